"""A gate for speed: token counts exactly, times as ratios within one run."""
