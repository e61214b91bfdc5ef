"""A simulation of many replicas behind a router, with and without a shared store."""
