"""Where the weights go, how positions are rotated, which adapters apply, and what fits."""
