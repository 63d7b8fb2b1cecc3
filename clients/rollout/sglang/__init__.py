"""The plugin that makes every scheduler rank of an SGLang server a receiver rank, and what the daemon says to it."""
