"""Versions sent rank to rank: who takes part, what carries the bytes, and the two rounds of a version."""
