"""Measurements of Rekindle beside another llama.cpp server. Run them with `make bench`."""
