"""The servers to compare, and their processes."""
