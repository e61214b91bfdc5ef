"""Rekindle: a local LLM server that never prefills the same token twice."""

__version__ = "0.1.0"
