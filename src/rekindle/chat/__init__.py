"""Conversations, prompts and replies: everything that is text."""
