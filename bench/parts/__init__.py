"""One part alone: the disk tier, a grammar, a tokenizer."""
