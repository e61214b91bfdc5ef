"""Ends a call before its reply is cut off.

Near the end of a reply, a short valid end of the grammar is always known. A token after which no
end would fit is not taken: the known end is forced instead, token by token.
"""

from rekindle.generation.request import LANDING_TOKENS
from rekindle.llama.grammar.matcher import Matcher
from rekindle.llama.grammar.shortest_end import EndFinder, completes

END_OF_TURN = -1  # in place of a forced token: any token that ends the turn

# With more tokens left, no end is looked for. Picked: an end of half this length is found in time.
LOOK_AHEAD = 2_048
MAX_SKIPPED = 8  # tokens of a known end that the model may have written in its own way; picked


class Lander:
    """Leads a grammar to its end within the `n_left` tokens that may still be sampled.

    The known end follows from the tokens of the reply, so a resumed reply continues as it would
    have. `is_landing` does not follow from them, and is set by the caller that resumes a reply.
    """

    def __init__(self, matcher: Matcher, finder: EndFinder, *, n_left: int) -> None:
        self._matcher = matcher
        self._finder = finder
        self._n_left = n_left
        self.is_landing = False  # each token from here on is forced
        self._look_at = LOOK_AHEAD  # an end is looked for when so many tokens are left
        self._longest = 0  # length of the longest end that was known
        self._is_known = False
        self._end: list[int] | None = None  # from here, if that is known; None: none was found
        self._tried: tuple[int, list[int] | None] | None = None  # a next token, the end after it

    def forced(self) -> int | None:
        """Return the next token of the end if the end has begun."""
        self._look()
        return self._next() if self.is_landing else None

    def checked(self, token: int) -> int:
        """Return the sampled token, or the next one of the end if no end fits after it.

        A model that writes the known end by itself is not forced.
        """
        if not self._fits() or self._next() == token:
            return token
        end = self._end_after(token)
        if end is not None and len(end) < self._n_left:
            return token
        self.is_landing = True
        forced = self._next()
        assert forced is not None
        return forced

    def accept(self, token: int) -> None:
        """Take the next token of the reply, before the matcher takes it."""
        self._look()
        if self._end and self._end[0] == token:
            self._end = self._end[1:]
        elif self._is_known and self._n_left <= self._look_at:
            self._note(self._end_after(token), n_left=self._n_left - 1)
        else:
            self._is_known, self._end = False, None
        self._tried = None
        self._n_left -= 1

    def _look(self) -> None:
        if not self._is_known and self._n_left <= self._look_at:
            self._note(self._finder.find(self._matcher.copy()), n_left=self._n_left)

    def _note(self, end: list[int] | None, *, n_left: int) -> None:
        """Take the end that was found, and decide when to look again."""
        self._is_known, self._end = True, end
        # An end that does not fit now hardly fits later: the model writes no shorter one.
        self._look_at = n_left // 2
        if end is not None and len(end) <= n_left:
            self._longest = max(self._longest, len(end))
            # Another call, or the model's own way to write this one, may take more.
            self._look_at = max(self._look_at, LANDING_TOKENS, 2 * self._longest)

    def _fits(self) -> bool:
        """Return whether an end is known, and so many tokens are left."""
        return self._end is not None and len(self._end) <= self._n_left

    def _next(self) -> int | None:
        if self._end is None:
            return None
        return self._end[0] if self._end else END_OF_TURN

    def _end_after(self, token: int) -> list[int] | None:
        if self._tried is None or self._tried[0] != token:
            self._tried = token, self._find_after(token)
        return self._tried[1]

    def _find_after(self, token: int) -> list[int] | None:
        after = self._matcher.copy()
        if not after.consume_token(token):
            return None
        known = self._end or []
        for n_skipped in range(min(len(known), MAX_SKIPPED)):
            end = known[n_skipped:]
            if len(end) < self._n_left and completes(after, end):
                return end
        return self._finder.find(after)
