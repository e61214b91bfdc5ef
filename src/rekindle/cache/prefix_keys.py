"""The chain of keys over a growing list of tokens, computed as far as someone asks."""

from rekindle.cache.block import BLOCK_TOKENS, TOKEN_BYTES, Key, Kind, entry_key, token_bytes


class PrefixKeys:
    """`tokens` is shared with its owner, who only ever appends to it."""

    def __init__(self, root: Key, tokens: list[int]) -> None:
        self.tokens = tokens
        self.root = root
        self._blocks = [root]  # the n-th is the key of the prefix of n whole blocks
        self._encoded = bytearray()

    def after_blocks(self, n_blocks: int) -> Key:
        while len(self._blocks) <= n_blocks:
            start = (len(self._blocks) - 1) * BLOCK_TOKENS
            tokens = self.between(start, start + BLOCK_TOKENS)
            assert len(tokens) == BLOCK_TOKENS * TOKEN_BYTES
            self._blocks.append(entry_key(self._blocks[-1], Kind.BLOCK, tokens))
        return self._blocks[n_blocks]

    def between(self, start: int, stop: int) -> bytes:
        n_encoded = len(self._encoded) // TOKEN_BYTES
        if stop > n_encoded:
            self._encoded += token_bytes(self.tokens[n_encoded:])
        return bytes(self._encoded[start * TOKEN_BYTES : stop * TOKEN_BYTES])
