"""Benchmarks on state recorded from the demo's RL run: construct, wire and memory."""
