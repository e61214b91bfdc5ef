"""Where prompts left the known prefix, what that cost, and what to do about it."""
