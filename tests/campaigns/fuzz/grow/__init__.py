"""Generators of cases, one module for each kind of input."""
