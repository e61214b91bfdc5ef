"""Scheduling: sequences, slots, batches, and the one thread that owns the backend."""
