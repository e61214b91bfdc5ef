"""GGUF files: getting one onto this machine, and checking it."""
