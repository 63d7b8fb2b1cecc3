"""End to end: real trainer ranks, daemons, store and receiver, killed and stopped at chosen moments."""
