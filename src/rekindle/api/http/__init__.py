"""HTTP for every wire format: limits, headers, draining, disconnects."""
