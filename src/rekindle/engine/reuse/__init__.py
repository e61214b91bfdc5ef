"""Reuse of live and stored prefixes: finding them, placing sequences, restoring rows."""
