"""Where a sequence starts: the longest live or stored prefix."""
