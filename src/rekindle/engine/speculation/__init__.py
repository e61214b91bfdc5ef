"""Speculative decoding: guess the next tokens of a reply, and let the model check them at once."""
