"""The model's Jinja template: what it renders, and how client text stays text."""
