"""A conversation to token ids, with the tokens of remembered turns."""
