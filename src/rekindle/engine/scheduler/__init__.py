"""Which sequences run next, and which tokens form the next batch."""
