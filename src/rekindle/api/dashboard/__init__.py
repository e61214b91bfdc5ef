"""The dashboard: static files, and the event feed that the page reads."""
