"""Models with random weights, and measurements that need them."""
