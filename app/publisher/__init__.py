"""The parts of the publisher role: jobs, rank sessions, worker processes, uploads."""
