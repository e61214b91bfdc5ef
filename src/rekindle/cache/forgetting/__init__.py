"""Deletions that are kept: what was deleted must not come back."""
