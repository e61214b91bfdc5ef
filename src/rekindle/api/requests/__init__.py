"""Parts of requests that every wire format reads in the same way."""
