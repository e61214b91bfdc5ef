"""Values and protocols between `chat`, which knows text, and engines, which know tokens."""
