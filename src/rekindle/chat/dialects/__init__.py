"""How models write tool calls and reasoning."""
