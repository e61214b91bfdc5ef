"""Ollama's API: chat, generate, embeddings, and what its clients ask about models."""
