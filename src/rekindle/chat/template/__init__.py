"""The model's Jinja template, and the guard that keeps client text plain."""
