"""llama_tokenize as llguidance calls it, with the limits of `Vocabulary.tokenize`.

When llguidance computes a mask, it tokenises forced text, such as a constant of a JSON schema.
The first mask is computed on a worker thread, later ones on the engine thread.
"""

import ctypes
import logging
import threading
from functools import partial

from rekindle.errors import InvalidRequest
from rekindle.llama.library import lib
from rekindle.llama.tokenizer.vocabulary import Vocabulary

_log = logging.getLogger(__name__)

TokenizeFunction = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.c_void_p,  # vocab
    ctypes.c_void_p,  # text
    ctypes.c_int32,
    ctypes.c_void_p,  # tokens
    ctypes.c_int32,
    ctypes.c_bool,
    ctypes.c_bool,
)
SHORT_BYTES = 1_000  # harmless in every vocabulary, on every stack
# llguidance tokenises the whole forced text again for every mask. 40,000 letters take 20 ms, or
# 130 ms with std::regex.
MAX_FORCED_BYTES = 50_000
# llguidance treats 0 tokens for forced text as an error of the grammar. ctypes would swallow an
# exception, and the return value would be undefined.
_REFUSED = 0


class GrammarTokenizer:
    """A tokenise callback. Keep it as long as any matcher: llguidance holds the bare pointer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._native = TokenizeFunction(ctypes.cast(lib.llama_tokenize, ctypes.c_void_p).value or 0)
        self._callback = TokenizeFunction(self._tokenize)
        self._refusals = threading.local()

    @property
    def pointer(self) -> int:
        return ctypes.cast(self._callback, ctypes.c_void_p).value or 0

    def take_refusal(self) -> str | None:
        """Return and clear the reason why the last text on this thread was refused."""
        reason: str | None = getattr(self._refusals, "reason", None)
        self._refusals.reason = None
        return reason

    def _tokenize(
        self,
        vocab: int,
        text: int,
        n_bytes: int,
        tokens: int,
        capacity: int,
        add_special: bool,  # noqa: FBT001 - the signature is llama.cpp's
        parse_special: bool,  # noqa: FBT001
    ) -> int:
        call = partial(
            self._native, vocab, text, n_bytes, tokens, capacity, add_special, parse_special
        )
        if n_bytes <= SHORT_BYTES:
            count: int = call()
            return count
        try:
            if n_bytes > MAX_FORCED_BYTES or self._vocabulary.backtracks:
                limit = SHORT_BYTES if self._vocabulary.backtracks else MAX_FORCED_BYTES
                raise InvalidRequest(
                    f"it forces a text of {n_bytes:,} bytes, such as a constant;"
                    f" at most {limit:,} are accepted with this model."
                )
            data = ctypes.string_at(text, n_bytes)
            characters = data.decode("utf-8", "replace")
            if add_special or characters.encode() != data:  # not possible with Vocabulary.tokenize
                return self._vocabulary.with_stack_for(characters, call)
            found = self._vocabulary.tokenize(characters, parse_special=parse_special)
            if len(found) > capacity:
                return -len(found)  # llama.cpp's way to ask for a larger buffer
            ctypes.memmove(tokens, (ctypes.c_int32 * len(found))(*found), 4 * len(found))
            return len(found)
        except InvalidRequest as error:
            self._refusals.reason = error.message
        except Exception:
            _log.exception("grammar: tokenising %d bytes failed", n_bytes)
        return _REFUSED
