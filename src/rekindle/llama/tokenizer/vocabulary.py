"""The model's vocabulary, a `generation.Tokenizer`. Immutable: any thread may use it."""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import compress, repeat
from threading import Lock
from typing import Any

from rekindle.errors import InvalidRequest, ShuttingDown
from rekindle.generation.tokenizer import InfillMarks
from rekindle.llama.library import holding_gil, lib
from rekindle.llama.tokenizer.deep_stack import call_with_stack, own_stack_bytes
from rekindle.llama.tokenizer.merging import check_cost
from rekindle.llama.tokenizer.pre_tokenizer import PreTokenizer
from rekindle.llama.tokenizer.special_strings import SpecialStrings

# Called for every token of the vocabulary while other threads import or serve.
_token_to_piece = holding_gil("llama_token_to_piece")
_attributes = holding_gil("llama_vocab_get_attr")
_is_eog = holding_gil("llama_vocab_is_eog")


class Vocabulary:
    """Reads the attributes of all tokens at once, and the bytes of a token when first needed."""

    def __init__(self, handle: Any, pre_tokenizer: PreTokenizer) -> None:
        self.handle = handle
        self._pre_tokenizer = pre_tokenizer
        self._own_stack_bytes = own_stack_bytes()
        self.n_vocab: int = lib.llama_vocab_n_tokens(handle)
        self.kind: int = lib.llama_vocab_type(handle)
        tokens = range(self.n_vocab)
        self._pieces: list[bytes | None] = [None] * self.n_vocab
        self._reading = Lock()
        hidden = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
        user_defined = lib.LLAMA_TOKEN_ATTR_USER_DEFINED  # found in plain text as well
        special = [
            (token, attributes)
            for token, attributes in enumerate(map(_attributes, repeat(handle), tokens))
            if attributes & (hidden | user_defined)
        ]
        self._hidden = frozenset(t for t, attributes in special if attributes & hidden)
        self._controls = [t for t, a in special if a & lib.LLAMA_TOKEN_ATTR_CONTROL]
        self._in_text = self._special_strings([t for t, a in special if a & user_defined])
        self._in_prompt = self._special_strings([t for t, _ in special])
        self.eog_tokens = frozenset(compress(tokens, map(_is_eog, repeat(handle), tokens)))

    def close(self) -> None:
        """Read nothing more from llama.cpp, whose vocabulary is about to be freed."""
        with self._reading:
            self.handle = None

    @property
    def backtracks(self) -> bool:
        """Return whether some short texts take a second to tokenise."""
        return self._pre_tokenizer.backtracks

    def pieces(self, *, control_mark: bytes) -> list[bytes]:
        """Return the bytes of every token. Control tokens have the mark before their text."""
        pieces = self._all_pieces()
        self._byte_tokens = self._byte_tokens_in(pieces)  # reading the pieces takes long
        for token in self._controls:
            pieces[token] = control_mark + pieces[token]
        return pieces

    @cached_property
    def special_strings(self) -> tuple[str, ...]:
        return self._texts(self._controls)

    @cached_property
    def end_strings(self) -> tuple[str, ...]:
        return self._texts(self.eog_tokens)

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
        """The token that ends every text of an embedding model; None: there is none."""
        token: int = lib.llama_vocab_eos(self.handle)
        return token if token >= 0 and lib.llama_vocab_get_add_eos(self.handle) else None

    @cached_property
    def marks_between_texts(self) -> tuple[int, ...]:
        """The tokens between a query and a document, for models that rank."""
        sep: int = lib.llama_vocab_sep(self.handle)
        adds_sep = sep >= 0 and lib.llama_vocab_get_add_sep(self.handle)
        return (*self.marks_behind_texts, *([sep] if adds_sep else []))

    @cached_property
    def marks_behind_texts(self) -> tuple[int, ...]:
        if not lib.llama_vocab_get_add_eos(self.handle):
            return ()
        tokens = (lib.llama_vocab_eos(self.handle), lib.llama_vocab_sep(self.handle))
        return next(((token,) for token in tokens if token >= 0), ())

    @cached_property
    def infill(self) -> InfillMarks:
        read = (
            lib.llama_vocab_fim_pre,
            lib.llama_vocab_fim_suf,
            lib.llama_vocab_fim_mid,
            lib.llama_vocab_fim_rep,
            lib.llama_vocab_fim_sep,
        )
        tokens = [each(self.handle) for each in read]
        return InfillMarks(*(token if token >= 0 else None for token in tokens))

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        check_cost(text)  # both checks: of the whole text, before it is cut
        self._pre_tokenizer.check_time(text)
        special = self._in_prompt if parse_special else self._in_text
        tokens: list[int] = []
        for part in special.parts(text):
            tokens += self._tokenize(part, parse_special=parse_special)
        return tokens

    def _tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        data = text.encode("utf-8", "replace")
        # A token has one byte or more, except for the space that some vocabularies add.
        capacity = len(data) + 2
        tokens = (ctypes.c_int32 * capacity)()
        add_special = False
        count = self.with_stack_for(
            text,
            lambda: lib.llama_tokenize(
                self.handle, data, len(data), tokens, capacity, add_special, parse_special
            ),
        )
        assert count >= 0, f"llama_tokenize needs {-count} places for {len(data)} bytes"
        return tokens[:count]

    def with_stack_for(self, text: str, call: Callable[[], int]) -> int:
        """Make the call, which tokenises the text, on a stack that is large enough.

        Raise InvalidRequest for a text that needs too much stack or time.
        """
        self._pre_tokenizer.check_time(text)
        needed = self._pre_tokenizer.stack_bytes(text)
        if needed <= self._own_stack_bytes:
            return call()
        try:
            return call_with_stack(call, needed)
        except MemoryError as error:
            raise InvalidRequest(
                f"Tokenising this text may take {needed // 2**20:,} MiB of memory, more than this"
                " server has. Break up its longest run of characters with spaces or line breaks."
            ) from error

    def tokenize_bytes(self, data: bytes) -> list[int] | None:
        """Return one token per byte, even for partial characters; None: a byte has no token."""
        try:
            return [self._byte_tokens[byte] for byte in data]
        except KeyError:
            return None

    def piece(self, token: int) -> bytes:
        return b"" if token in self._hidden else self._piece(token)

    def detokenize(self, tokens: Sequence[int], *, render_special: bool) -> bytes:
        piece = self._piece if render_special else self.piece
        return b"".join(map(piece, tokens))

    @cached_property
    def _byte_tokens(self) -> dict[int, int]:
        return self._byte_tokens_in(self._all_pieces())

    def _byte_tokens_in(self, pieces: list[bytes]) -> dict[int, int]:
        return {
            piece[0]: token
            for token, piece in enumerate(pieces)
            if len(piece) == 1 and token not in self._hidden
        }

    def _texts(self, tokens: Iterable[int]) -> tuple[str, ...]:
        texts = {self._piece(token).decode("utf-8", "replace") for token in tokens}
        return tuple(sorted(texts - {""}))

    def _special_text(self, token: int) -> str:
        return self._piece(token).decode() if token >= 0 else ""

    def _special_strings(self, tokens: Sequence[int]) -> SpecialStrings:
        texts = {
            t: lib.llama_vocab_get_text(self.handle, t).decode("utf-8", "replace") for t in tokens
        }
        # llama.cpp drops white space beside some tokens, so that space must stay in one call.
        stripping = lib.LLAMA_TOKEN_ATTR_LSTRIP | lib.LLAMA_TOKEN_ATTR_RSTRIP
        strips = {t for t in tokens if _attributes(self.handle, t) & stripping}
        cuttable = [
            text
            for token, text in texts.items()
            if token not in strips and not (strips and text != text.strip())
        ]
        return SpecialStrings(texts.values(), cuttable=cuttable)

    def _all_pieces(self) -> list[bytes]:
        return self._read_pieces(range(self.n_vocab))

    def _piece(self, token: int) -> bytes:
        piece = self._pieces[token]
        if piece is None:
            (piece,) = self._read_pieces((token,))
            self._pieces[token] = piece
        return piece

    def _read_pieces(self, tokens: Iterable[int]) -> list[bytes]:
        buffer = ctypes.create_string_buffer(64)
        lstrip, render_special = 0, True
        pieces = []
        with self._reading:
            if self.handle is None:
                raise ShuttingDown("The model was unloaded.")
            for token in tokens:
                length = _token_to_piece(
                    self.handle, token, buffer, len(buffer), lstrip, render_special
                )
                if length < 0:
                    buffer = ctypes.create_string_buffer(-length)
                    length = _token_to_piece(
                        self.handle, token, buffer, len(buffer), lstrip, render_special
                    )
                pieces.append(ctypes.string_at(buffer, length))
        return pieces
