"""`rekindle top`."""
