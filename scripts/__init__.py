"""Programs for those who work on Rekindle."""
