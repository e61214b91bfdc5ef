"""What the cache holds, as people see it."""
