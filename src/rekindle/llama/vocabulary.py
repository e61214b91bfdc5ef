"""The model's vocabulary, a `generation.Tokenizer`. It never changes: any thread may ask."""

import ctypes
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from rekindle.llama.library import holding_gil, lib

# Called for every token of the vocabulary, while other threads import or serve.
_token_to_piece = holding_gil("llama_token_to_piece")
_attributes = holding_gil("llama_vocab_get_attr")
_is_eog = holding_gil("llama_vocab_is_eog")

_USUAL_BYTES = 64  # of a token's text, at most


class Vocabulary:
    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self._n_vocab: int = lib.llama_vocab_n_tokens(handle)
        self._pieces = _Pieces(handle, self._n_vocab)
        attributes = [_attributes(handle, token) for token in range(self._n_vocab)]
        hidden = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
        self._hidden = frozenset(t for t, each in enumerate(attributes) if each & hidden)
        self._controls = [
            t for t, each in enumerate(attributes) if each & lib.LLAMA_TOKEN_ATTR_CONTROL
        ]
        # llama.cpp makes a control token of whatever ends a turn, but for the one a file names.
        named = {lib.llama_vocab_eos(handle), lib.llama_vocab_eot(handle)} - {-1}
        candidates = named.union(self._controls)
        self.eog_tokens = frozenset(t for t in candidates if _is_eog(handle, t))

    @property
    def n_vocab(self) -> int:
        return self._n_vocab

    def pieces(self, *, control_mark: bytes) -> list[bytes]:
        """Of every token, control tokens as the text they are written as behind a mark."""
        pieces = [self._pieces[token] for token in range(self._n_vocab)]
        for token in self._controls:
            pieces[token] = control_mark + pieces[token]
        return pieces

    @cached_property
    def special_strings(self) -> tuple[str, ...]:
        texts = {self._pieces[token].decode("utf-8", "replace") for token in self._controls}
        return tuple(sorted(texts - {""}))

    @cached_property
    def end_strings(self) -> tuple[str, ...]:
        texts = {self._pieces[token].decode("utf-8", "replace") for token in self.eog_tokens}
        return tuple(sorted(texts - {""}))

    @cached_property
    def bos_text(self) -> str:
        return self._special_text(lib.llama_vocab_bos(self.handle))

    @cached_property
    def eos_text(self) -> str:
        return self._special_text(lib.llama_vocab_eos(self.handle))

    @cached_property
    def bos_token(self) -> int | None:
        token: int = lib.llama_vocab_bos(self.handle)
        return token if token >= 0 and lib.llama_vocab_get_add_bos(self.handle) else None

    @cached_property
    def added_eos_token(self) -> int | None:
        """The token that ends every text of an embedding model, or None if it wants none."""
        token: int = lib.llama_vocab_eos(self.handle)
        return token if token >= 0 and lib.llama_vocab_get_add_eos(self.handle) else None

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        data = text.encode("utf-8", "replace")
        # A token is one byte or more, but for the space some vocabularies put in front.
        capacity = len(data) + 2
        tokens = (ctypes.c_int32 * capacity)()
        add_special = False
        count = lib.llama_tokenize(
            self.handle, data, len(data), tokens, capacity, add_special, parse_special
        )
        assert count >= 0, f"llama_tokenize wants {-count} places for {len(data)} bytes"
        return tokens[:count]

    def tokenize_bytes(self, data: bytes) -> list[int] | None:
        """One token for each byte, also where they are no characters; None: one has no token."""
        try:
            return [self._byte_tokens[byte] for byte in data]
        except KeyError:
            return None

    def piece(self, token: int) -> bytes:
        return b"" if token in self._hidden else self._pieces[token]

    def detokenize(self, tokens: Sequence[int], *, render_special: bool) -> bytes:
        if not render_special:
            tokens = [token for token in tokens if token not in self._hidden]
        return b"".join([self._pieces[token] for token in tokens])

    @cached_property
    def _byte_tokens(self) -> dict[int, int]:
        pieces = ((token, self.piece(token)) for token in range(self._n_vocab))
        return {piece[0]: token for token, piece in pieces if len(piece) == 1}

    def _special_text(self, token: int) -> str:
        return self._pieces[token].decode() if token >= 0 else ""


class _Pieces(dict[int, bytes]):
    """What each token is written as, control tokens too; read when one is first asked for."""

    def __init__(self, handle: Any, n_vocab: int) -> None:
        self._handle = handle
        self._n_vocab = n_vocab

    def __missing__(self, token: int) -> bytes:
        if not 0 <= token < self._n_vocab:  # llama.cpp would end the process
            raise IndexError(token)
        buffer = ctypes.create_string_buffer(_USUAL_BYTES)
        length = self._read(token, buffer)
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = self._read(token, buffer)
        piece = self[token] = buffer.raw[:length]
        return piece

    def _read(self, token: int, buffer: ctypes.Array[ctypes.c_char]) -> int:
        render_special = True
        length: int = _token_to_piece(self._handle, token, buffer, len(buffer), 0, render_special)
        return length
