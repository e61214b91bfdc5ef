"""The contents of the cache, as people see them."""
