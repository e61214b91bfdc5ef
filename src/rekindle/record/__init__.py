"""A proxy that writes what an agent sends as a trace, without keys."""
