"""The process of one engine: llama.cpp, the prefix cache and the engine loop of one model."""
