"""Which models are served, and what each of them needs to answer."""
