"""A rig for tests: real Megatron-Core training in several processes on CPUs, and a dense reference of its weights."""
