"""What the benchmark prints and draws."""
