"""Prompts computed ahead of the request that needs them."""
