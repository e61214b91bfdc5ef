"""Conversations, prompts and replies: the text side of a request."""
