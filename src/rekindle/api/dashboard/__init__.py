"""The dashboard: a page of static files and the feed behind it."""
