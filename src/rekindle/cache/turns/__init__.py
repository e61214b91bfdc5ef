"""The exact tokens of past replies."""
