"""What dialects are made of: reading calls from text, and writing grammars of them."""
