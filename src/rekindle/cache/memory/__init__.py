"""The RAM tier."""
