"""Helpers of the dialects: reading calls from text, and writing grammars of them."""
