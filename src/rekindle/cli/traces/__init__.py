"""Commands that read or write recorded traffic."""
