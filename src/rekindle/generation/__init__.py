"""The seam between text and tokens: values that cross it, and protocols of both sides."""
