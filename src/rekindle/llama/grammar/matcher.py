"""The state of one reply under its grammar: it masks logits and takes tokens."""

import llguidance
import numpy as np
from numpy.typing import NDArray

from rekindle.errors import EngineError, InvalidRequest, RekindleError

MAX_REASON = 500  # characters; picked
LIMITS = ("too many", "limit")  # llguidance's words when a grammar needs more than it allows


class Matcher:
    def __init__(self, matcher: llguidance.LLMatcher, n_vocab: int) -> None:
        self._matcher = matcher
        self._n_vocab = n_vocab
        self._mask = np.empty((n_vocab + 31) // 32, dtype=np.int32)
        self._forced: list[int] = []  # from the next token on, as far as it is known
        self._n_followed = 0  # of them, taken since

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Set the logits of forbidden tokens to -inf, in place."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():
            raise _failure(self._matcher)
        allowed = np.unpackbits(self._mask.view(np.uint8), count=self._n_vocab, bitorder="little")
        np.putmask(logits, allowed == 0, -np.inf)

    def forced_tokens(self) -> list[int]:
        """Return the tokens that have to come next, by one way to tokenise the forced text.

        The mask is what counts: behind a character of several tokens, or where another text could
        still come, it may leave other tokens. llguidance tokenises forced text at each call, so
        the tokens are kept while they are followed.
        """
        if self._n_followed == len(self._forced):
            self._forced, self._n_followed = self._matcher.compute_ff_tokens(), 0
        return self._forced[self._n_followed :]

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise _failure(self._matcher)
        if self._forced[self._n_followed : self._n_followed + 1] == [token]:
            self._n_followed += 1
        else:
            self._forget_forced()

    def accept_all(self, tokens: list[int]) -> None:
        self._forget_forced()
        if not self._matcher.consume_tokens(tokens):
            raise _failure(self._matcher)

    def copy(self) -> llguidance.LLMatcher:
        return self._matcher.deep_copy()

    def try_accept(self, tokens: list[int]) -> bool:
        """Accept all tokens or none. Call it only at the beginning."""
        self._forget_forced()
        if self._matcher.try_consume_tokens(tokens) == len(tokens):
            return True
        self._matcher.reset()
        return False

    def _forget_forced(self) -> None:
        self._forced, self._n_followed = [], 0


def _failure(matcher: llguidance.LLMatcher) -> RekindleError:
    """Return the error of a matcher. Some grammars grow too large only while they are followed."""
    text = reason(matcher)
    if any(each in text for each in LIMITS):
        return InvalidRequest(f"The grammar is too complex: {text}.", "response_format")
    return EngineError(f"The grammar engine failed: {text}")


def reason(matcher: llguidance.LLMatcher) -> str:
    """Return llguidance's error without the dump of its state or stack."""
    error: str = matcher.get_error()
    text = " ".join(error.split("<state>")[0].split("<backtrace>")[0].split())
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."  # it may quote a schema
