"""llama-server's own completions: /completion and /infill."""
