"""Text to token ids and back, by the vocabulary of the model file."""
