"""Constrained output through llguidance."""
