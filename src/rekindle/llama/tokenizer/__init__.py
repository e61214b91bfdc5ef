"""Text to token ids and back, as the model's file says."""
