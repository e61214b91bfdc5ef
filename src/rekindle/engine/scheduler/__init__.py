"""The choice of sequences that run next, and of tokens for the next batch."""
