"""Follows one reply: where its next tokens may be found, and how often that was right."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rekindle.cache.drafts.stored_texts import N as N_STORED
from rekindle.engine.speculation.acceptance import Rates
from rekindle.engine.speculation.own_context import OwnContext
from rekindle.generation.drafts import DraftSource

# Around the place where a text was left, this far ahead and back, it is looked for again.
AHEAD, BACK = 64, 8
MAX_LOST_TOKENS = 32  # sampled since the text was left; then the place is given up. Picked.
MAX_MATCHED = 32  # beyond it, longer matches count the same
# After so many tokens without a match, one is looked for at every eighth: a text that repeats
# nothing pays an eighth, and one that does loses at most seven tokens of its first draft. Picked.
MAX_UNFOUND, SELDOM = 32, 8

FindStored = Callable[[Sequence[int]], list[int]]


class Draft(NamedTuple):
    source: DraftSource
    tokens: list[int]
    n_forced: int = 0  # leading tokens that the grammar forces


class _Followed(NamedTuple):
    source: DraftSource
    text: Sequence[int]
    at: int  # index of the next token


class Drafter:
    """`tokens` is the sequence's own list. `note` follows each token that was added to it."""

    def __init__(
        self,
        tokens: list[int],
        earlier_reply: list[int],
        find_stored: FindStored | None,
        rates: Rates,
        ends: frozenset[int],
    ) -> None:
        self._tokens = tokens
        self._own = OwnContext(tokens)
        self._find_stored = find_stored
        self._rates = rates
        self._ends = ends
        self._followed: _Followed | None = None
        self._n_matched = 0  # tokens before the next one that agree
        self._lost: _Followed | None = None
        self._n_lost = 0
        self._n_unfound = 0  # tokens since the last match
        if earlier_reply:
            # The whole prompt agrees.
            self._followed = _Followed(DraftSource.REPLY, earlier_reply, 0)
            self._n_matched = MAX_MATCHED

    @property
    def n_bytes(self) -> int:
        """Memory of the index over the own tokens."""
        return self._own.n_bytes

    def note(self, token: int) -> None:
        """Take a sampled token, the last of `tokens` now."""
        followed = self._followed
        if followed is not None:
            is_right = followed.text[followed.at] == token
            self._rates.note(followed.source, self._n_matched, is_right=is_right)
            if is_right:
                self._n_matched += 1
                if followed.at + 1 < len(followed.text):
                    self._followed = followed._replace(at=followed.at + 1)
                    return
                self._lost = None
            else:
                self._lost, self._n_lost = followed, 0
                self._n_matched = 0
            self._followed = None
        self._seek()

    def draft(self, n_most: int, forced: Sequence[int] = ()) -> Draft | None:
        """Return up to that many tokens that may come next; None if nothing is known.

        `forced` are the next tokens as far as a grammar leaves no choice. If the followed text
        begins with them, the draft continues with that text.
        """
        sure = self._before_an_end(forced[:n_most])
        followed = self._followed
        if followed is not None:
            tokens = self._before_an_end(followed.text[followed.at : followed.at + n_most])
            if len(tokens) > len(sure) and tokens[: len(sure)] == sure:
                return Draft(followed.source, tokens, len(sure))
        return Draft(DraftSource.GRAMMAR, sure, len(sure)) if sure else None

    def _before_an_end(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens before the first that ends a reply: drafting it gains nothing."""
        found = list(tokens)
        for index, token in enumerate(found):
            if token in self._ends:
                return found[:index]
        return found

    def chances(self, draft: Draft) -> list[float]:
        """Return for each token the chance that it and all before it are right."""
        n_open = len(draft.tokens) - draft.n_forced
        n_matched = self._n_matched + draft.n_forced
        return [1.0] * draft.n_forced + list(self._rates.chances(draft.source, n_matched, n_open))

    def forget(self, *, is_private: bool) -> None:
        """Drop all but the reply's own tokens: other texts were deleted.

        A reply that has become private never asks for others again.
        """
        if is_private:
            self._find_stored = None
        for followed in (self._followed, self._lost):
            if followed is not None and followed.source is not DraftSource.CONTEXT:
                self._followed = self._lost = None

    def _seek(self) -> None:
        n_unfound, self._n_unfound = self._n_unfound, self._n_unfound + 1
        if n_unfound >= MAX_UNFOUND and n_unfound % SELDOM and self._lost is None:
            return
        self._followed = self._found_again() or self._found_here() or self._found_stored()
        if self._followed is not None:
            self._n_unfound = 0

    def _found_again(self) -> _Followed | None:
        """Look near the place where the last text was left: after an edit, the rest is the same."""
        lost = self._lost
        if lost is None:
            return None
        self._n_lost += 1
        if self._n_lost > MAX_LOST_TOKENS:
            self._lost = None
            return None
        last, before = self._tokens[-1], self._tokens[-2]
        text = lost.text
        for at in range(max(lost.at - BACK, 1), min(lost.at + AHEAD, len(text) - 1)):
            if text[at] == last and text[at - 1] == before:
                return self._follow(lost.source, text, at + 1)
        return None

    def _found_here(self) -> _Followed | None:
        at = self._own.find()
        return None if at is None else self._follow(DraftSource.CONTEXT, self._tokens, at)

    def _found_stored(self) -> _Followed | None:
        found = self._find_stored(self._tokens) if self._find_stored is not None else []
        if not found:
            return None
        # The next answer continues the text of the last one.
        self._n_matched = max(self._n_matched, N_STORED)
        return _Followed(DraftSource.STORE, found, 0)

    def _follow(self, source: DraftSource, text: Sequence[int], at: int) -> _Followed:
        self._n_matched = self._match(text, at)
        return _Followed(source, text, at)

    def _match(self, text: Sequence[int], at: int) -> int:
        """Return how many tokens before `at` agree with the last ones."""
        tokens, n_matched = self._tokens, 0
        most = min(MAX_MATCHED, at, len(tokens))
        while n_matched < most and text[at - 1 - n_matched] == tokens[-1 - n_matched]:
            n_matched += 1
        return n_matched
