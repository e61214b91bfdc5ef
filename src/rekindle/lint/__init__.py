"""How much of a client's prompts a server can reuse, and what in the text prevents more."""
