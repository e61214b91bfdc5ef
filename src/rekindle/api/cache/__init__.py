"""Rekindle's own endpoints for the cache."""
