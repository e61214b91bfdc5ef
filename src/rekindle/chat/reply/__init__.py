"""Tokens to reply events: text, reasoning, calls."""
