"""Why prompts missed the cache, what the misses cost, and how to avoid them."""
