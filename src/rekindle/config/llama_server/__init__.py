"""Flags and variables of llama-server, as this server takes them."""
