"""What is sent to whom when trainer and receiver ranks exchange a version directly (P2P)."""
