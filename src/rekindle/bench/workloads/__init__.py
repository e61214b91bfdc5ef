"""The workloads of the benchmark, and the texts that they send."""
