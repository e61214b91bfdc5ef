"""Tokens as they are put together, with a key of all of them so far; and texts known as tokens."""

from array import array
from collections.abc import Iterable
from hashlib import blake2b
from sys import getsizeof
from threading import Lock

from rekindle.bounded_cache import BoundedCache
from rekindle.chat.prompt.meaning import KEY_BYTES
from rekindle.chat.template.guard import PromptPiece
from rekindle.generation.tokenizer import Tokenizer

MAX_KNOWN_BYTES = 32_000_000  # about two dozen histories of 100k tokens; picked
PIECE_BYTES = 370  # what CPython needs for one beside its text and its tokens, about


class TokenRun:
    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self.remembered: list[tuple[int, int]] = []  # where turns that were sampled begin and end
        self._state = blake2b(digest_size=KEY_BYTES)
        self.extend(array("i", tokens))

    def extend(self, tokens: "array[int]") -> None:
        self.tokens += tokens
        self._state.update(tokens)

    def extend_sampled(self, tokens: Iterable[int]) -> None:
        start = len(self.tokens)
        self.extend(array("i", tokens))
        self.remembered.append((start, len(self.tokens)))

    def key(self, more: "Iterable[array[int]]" = ()) -> bytes:
        """Of these tokens, and of `more` behind them."""
        state = self._state.copy()
        for tokens in more:
            state.update(tokens)
        return state.digest()


class PieceTokenizer:
    """Each piece of a prompt is tokenised once, however often it comes back. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known = BoundedCache[PromptPiece, "array[int]"](max_bytes=MAX_KNOWN_BYTES)
        self._lock = Lock()

    @property
    def n_bytes(self) -> int:
        return self._known.n_bytes

    def __call__(self, piece: PromptPiece) -> "array[int]":
        with self._lock:
            if (tokens := self._known.get(piece)) is not None:
                return tokens
        parse_special = piece.parse_special
        tokens = array("i", self._tokenizer.tokenize(piece.text, parse_special=parse_special))
        with self._lock:
            self._known.put(piece, tokens, n_bytes=_size(piece, tokens))
        return tokens


def _size(piece: PromptPiece, tokens: "array[int]") -> int:
    return getsizeof(piece.text) + len(tokens) * tokens.itemsize + PIECE_BYTES
