"""`rekindle bench`: workloads as agents send them, on this server and its peers."""
