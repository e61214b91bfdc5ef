"""HTTP for every wire format: keys, limits, headers, draining, disconnects."""
