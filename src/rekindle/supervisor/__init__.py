"""Keeps an engine process alive, and continues its requests in the next one when it dies."""
