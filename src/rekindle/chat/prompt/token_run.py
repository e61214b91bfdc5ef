"""Tokens of a prompt while it is built, with a key of all of them; and texts known as tokens."""

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
PIECE_BYTES = 370  # estimate of CPython's overhead for a piece


class TokenRun:
    """The tokens of a prompt so far."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self.remembered: list[tuple[int, int]] = []  # start and end of each sampled turn
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
        """Return the key of these tokens, followed by `more`."""
        state = self._state.copy()
        for tokens in more:
            state.update(tokens)
        return state.digest()


class PieceTokenizer:
    """Tokenises each piece of a prompt once, and keeps its tokens. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known = BoundedCache[PromptPiece, "array[int]"](max_bytes=MAX_KNOWN_BYTES)
        self._lock = Lock()

    @property
    def n_bytes(self) -> int:
        return self._known.n_bytes

    def clear(self) -> None:
        with self._lock:
            self._known.clear()

    def __call__(self, piece: PromptPiece) -> "array[int]":
        with self._lock:
            if (tokens := self._known.get(piece)) is not None:
                return tokens
        parse_special = piece.parse_special
        tokens = array("i", self._tokenizer.tokenize(piece.text, parse_special=parse_special))
        with self._lock:
            n_bytes = getsizeof(piece.text) + len(tokens) * tokens.itemsize + PIECE_BYTES
            self._known.put(piece, tokens, n_bytes=n_bytes)
        return tokens
