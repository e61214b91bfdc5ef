"""How time and memory grow with entries, conversations, slots, context and tools."""
