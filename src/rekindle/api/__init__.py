"""Wire formats: HTTP in, neutral values through `chat`, HTTP out."""
