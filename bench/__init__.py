"""Benchmarks for developers: `python -m bench`. Users run `rekindle bench`, in rekindle.bench."""
