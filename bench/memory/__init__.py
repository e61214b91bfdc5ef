"""Whether memory stays within its bounds, and whether the accounts of it are right."""
