"""/health, /props, /metrics, /tokenize, /detokenize, /apply-template."""
