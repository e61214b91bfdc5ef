"""Choosing a token from a row of logits."""
