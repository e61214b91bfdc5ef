"""A cache directory from outside: `rekindle cache`."""
