"""Gemini's API."""
