"""Exports: rows of slots on their way to the cache."""
