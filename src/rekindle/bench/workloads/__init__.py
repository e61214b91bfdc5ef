"""What the benchmark sends."""
