"""Where the last tokens of a reply were seen before."""
