"""The process that touches tensors for one trainer rank, so that a device fault costs a version and nothing else."""
