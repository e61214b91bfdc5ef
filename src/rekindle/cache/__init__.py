"""Which prefixes we hold, and where. README.md in this folder has the map."""
