"""llama.cpp's grammars (GBNF), translated for llguidance."""
