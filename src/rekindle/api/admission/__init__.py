"""Which requests are served: the name they call, their origin, content type, key, and pace."""
