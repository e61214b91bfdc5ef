"""Operations on a cache directory for `rekindle cache`."""
