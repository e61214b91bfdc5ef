"""`rekindle chat`."""
