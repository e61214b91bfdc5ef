"""Grammars that begin inside a reply: a scanner of the reply's bytes finds their beginning.

Until then tokens are sampled without a grammar. The scanner works byte by byte, so the cuts
between tokens do not matter.
"""

import logging
from collections import deque
from typing import NamedTuple

from rekindle.generation.request import GrammarStart
from rekindle.llama.grammar.matcher import Matcher
from rekindle.llama.tokenizer.vocabulary import Vocabulary

_log = logging.getLogger(__name__)


class TriggerScanner:
    """Finds the trigger that is complete first, or the longest one if several are."""

    def __init__(self, start: GrammarStart) -> None:
        assert start.quiet is not None or not start.begins_quiet
        opening, closing = start.quiet or ("", "")
        marks = [_Watched(opening.encode(), at_start=not start.quiet_anywhere, opens_quiet=True)]
        marks += [_Watched(each.text.encode(), at_start=each.at_start) for each in start.triggers]
        marks.sort(key=lambda mark: -len(mark.text))
        self._marks = [mark for mark in marks if mark.text]
        self._texts = tuple(mark.text for mark in self._marks)
        self._closing = closing.encode()
        self._n_recent = max(map(len, (self._closing, *self._texts)))
        self._has_triggers = bool(start.triggers)
        self.is_quiet = start.begins_quiet
        # The last bytes of the current span, quiet or not. No mark begins before that span.
        self._recent = bytearray()
        self._has_begun = False  # more than white space came before `_recent`
        self.n_bytes = 0

    def feed(self, data: bytes) -> int | None:
        """Return the byte offset in the reply where the grammar begins; None: not yet."""
        for byte in data:
            self.n_bytes += 1
            self._recent.append(byte)
            n_covered = self._covered_in_quiet() if self.is_quiet else self._covered()
            if n_covered is not None:
                return self.n_bytes - n_covered
        self._forget(max(0, len(self._recent) - self._n_recent))
        return None

    def would_hold(self, mark: bytes, data: bytes) -> bool:
        """Return whether the mark would stand in the current span after this data."""
        return mark in self._recent + data

    def _covered(self) -> int | None:
        """Return how many of the last bytes the grammar covers; None: it has not begun."""
        if not self._recent.endswith(self._texts):
            return None
        for mark in self._marks:
            if not self._recent.endswith(mark.text):
                continue
            before = self._recent[: -len(mark.text)]
            if mark.at_start and (self._has_begun or before.strip()):
                continue
            if not mark.opens_quiet:
                return len(mark.text)
            self._forget(len(before))
            self._recent.clear()
            self.is_quiet = True
            return None
        return None

    def _covered_in_quiet(self) -> int | None:
        if not self._recent.endswith(self._closing):
            return None
        self._recent.clear()
        self.is_quiet = False
        return None if self._has_triggers else 0

    def _forget(self, n_bytes: int) -> None:
        if not self.is_quiet and self._recent[:n_bytes].strip():
            self._has_begun = True
        del self._recent[:n_bytes]


class LazyGrammar:
    """A matcher that is not used yet, with the scanner that finds its beginning.

    If the token that completes a trigger also breaks the grammar, the trigger does not count.
    """

    def __init__(self, matcher: Matcher, start: GrammarStart, vocabulary: Vocabulary) -> None:
        self.matcher = matcher
        # Without triggers, the grammar begins at the end of the reasoning, and the reply may not
        # end before.
        self.must_begin = not start.triggers
        self._scanner = TriggerScanner(start)
        self._vocabulary = vocabulary
        self._n_bytes = 0
        # A trigger is cut into at most as many tokens as it has bytes.
        n_recent = max((len(trigger.text.encode()) for trigger in start.triggers), default=1)
        self._recent: deque[int] = deque(maxlen=n_recent)

    def accept(self, token: int) -> bool:
        """Take the next token of the reply. Return True once the grammar has begun."""
        piece = self._vocabulary.detokenize([token], render_special=True)
        if not piece:
            return False
        self._recent.append(token)
        self._n_bytes += len(piece)
        while piece:
            n_scanned = self._scanner.n_bytes
            position = self._scanner.feed(piece)
            if position is None:
                return False
            if self._caught_up(self._n_bytes - position):
                return True
            piece = piece[self._scanner.n_bytes - n_scanned :]  # not a real trigger
        return False

    def _caught_up(self, n_covered: int) -> bool:
        """Feed the matcher the covered bytes. Return True if the grammar has begun."""
        cut, tokens = self._covered(n_covered)
        # White space in the token that ends a quiet span may belong to that span.
        for text in (cut, cut.lstrip()):
            as_bytes = self._vocabulary.tokenize_bytes(text)
            if as_bytes is not None and self.matcher.try_accept([*as_bytes, *tokens]):
                return True
        _log.debug("grammar: beginning does not match text=%r", cut)
        return self.must_begin  # it begins with the next token

    def _covered(self, n_covered: int) -> tuple[bytes, list[int]]:
        """Return the last bytes of the reply: the end of a token, and the tokens after it."""
        tokens: list[int] = []
        for token in reversed(self._recent):
            piece = self._vocabulary.detokenize([token], render_special=True)
            if n_covered < len(piece):
                return piece[len(piece) - n_covered :], tokens
            tokens.insert(0, token)
            n_covered -= len(piece)
        return b"", tokens


class _Watched(NamedTuple):
    text: bytes
    at_start: bool = False
    opens_quiet: bool = False
