"""The composition root: builds a server from its settings, and runs it."""
