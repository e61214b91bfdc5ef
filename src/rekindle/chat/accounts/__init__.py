"""Records of past requests: sessions, reasons for cache misses, log lines."""
