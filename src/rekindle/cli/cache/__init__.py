"""`rekindle cache`."""
