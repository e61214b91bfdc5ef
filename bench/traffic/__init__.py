"""Measurements on recorded traffic of real clients."""
