"""Connections: bounds that hold before a request reaches the application."""
