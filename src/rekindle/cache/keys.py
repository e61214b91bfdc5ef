"""The chain of keys over a growing list of tokens, computed on demand."""

from rekindle.cache.entry import BLOCK_TOKENS, TOKEN_BYTES, Key, Kind, entry_key, token_bytes
from rekindle.common_prefix import n_common


class PrefixKeys:
    """`tokens` is shared with its owner, which only ever appends to it."""

    def __init__(self, root: Key, tokens: list[int]) -> None:
        self.tokens = tokens
        self.root = root
        self._blocks = [root]  # the n-th is the key of the prefix of n whole blocks
        self._encoded = b""

    def after_blocks(self, n_blocks: int) -> Key:
        """Return the key of the prefix of that many whole blocks."""
        while len(self._blocks) <= n_blocks:
            start = (len(self._blocks) - 1) * BLOCK_TOKENS
            tokens = self.between(start, start + BLOCK_TOKENS)
            assert len(tokens) == BLOCK_TOKENS * TOKEN_BYTES
            self._blocks.append(entry_key(self._blocks[-1], Kind.BLOCK, tokens))
        return self._blocks[n_blocks]

    def checkpoint(self, position: int) -> Key:
        """Return the key of a checkpoint at the position."""
        n_blocks = position // BLOCK_TOKENS
        tokens = self.between(n_blocks * BLOCK_TOKENS, position)
        return entry_key(self.after_blocks(n_blocks), Kind.CHECKPOINT, tokens)

    def between(self, start: int, stop: int) -> bytes:
        """Return the encoded tokens at positions [start, stop)."""
        return self._encode(stop)[start * TOKEN_BYTES : stop * TOKEN_BYTES]

    def n_common(self, other: "PrefixKeys", n_limit: int) -> int:
        """Return the length of the common prefix, at most `n_limit` tokens."""
        # Bytes compare at the speed of memory; lists of numbers take a hundred times as long.
        return min(n_common(self._encode(n_limit), other._encode(n_limit)) // TOKEN_BYTES, n_limit)

    def _encode(self, n_tokens: int) -> bytes:
        """Encode at least that many tokens, or all if there are fewer."""
        n_encoded = len(self._encoded) // TOKEN_BYTES
        if n_tokens > n_encoded:
            self._encoded += token_bytes(self.tokens[n_encoded:])
        return self._encoded
