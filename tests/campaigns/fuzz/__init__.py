"""The fuzz campaign: hostile requests and files, grown from seeds."""
