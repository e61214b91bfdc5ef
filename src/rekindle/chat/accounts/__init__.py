"""What this process knows of its requests so far: sessions, misses, log lines."""
