"""The models of one server: found, loaded, pooled, and unloaded."""
