"""How trainer and receiver ranks find each other for rank-to-rank transfer: the coordinator's end and the daemons'."""
