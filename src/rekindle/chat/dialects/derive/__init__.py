"""Derives a dialect from a chat template, by rendering probe conversations."""
