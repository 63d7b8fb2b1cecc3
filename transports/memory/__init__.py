"""Trainer memory shared with the daemon's workers of the same node: named files and the words that guard them."""
