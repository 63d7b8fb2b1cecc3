"""The demo: a short real RL run whose every policy version reaches the rollout side through the daemons."""
