"""Estimates how long the shortest text of a regular expression is."""

import math
import re

_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\[dDwWsS]|\\[pP](?:\{\w*\}|\w)|\.")
_LITERAL = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|[^\\()|\[]", re.DOTALL)
_REPEAT = re.compile(r"\{(\d+)(,\d*)?\}\??|[*+?]\??")
_GROUP = re.compile(r"\((?:\?(?:[:=!]|P?<\w+>|<[=!]))?")
_ANCHOR = re.compile(r"\^|\$|\\[bBAzZ]")
MAX_REPEATED = 1_000_000  # picked

Size = tuple[int, float]  # characters, and choices of a letter


class PatternSize:
    """Reads one pattern. An optional part counts once: the model may have begun it."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._position = 0

    def find(self) -> tuple[int, int] | None:
        """Return characters and choices of a letter; None: the pattern is not understood."""
        try:
            size, choices = self._alternatives()
        except (ValueError, RecursionError):
            return None
        is_whole = self._position == len(self._pattern)
        return (size, math.ceil(choices)) if is_whole else None

    def _alternatives(self) -> Size:
        size, choices = self._sequence()
        while self._take(re.compile(r"\|")):
            more, more_choices = self._sequence()
            size, choices = max(size, more), max(choices, more_choices) + 1
        return size, choices

    def _sequence(self) -> Size:
        size, choices = 0, 0.0
        while self._position < len(self._pattern) and self._pattern[self._position] not in "|)":
            if self._take(_ANCHOR):
                continue
            more, more_choices = self._repeated()
            size, choices = size + more, choices + more_choices
        return size, choices

    def _repeated(self) -> Size:
        is_class = False
        if self._take(_CLASS):
            size, choices, is_class = 1, 1.0, True
        elif self._take(_GROUP):
            size, choices = self._alternatives()
            if not self._take(re.compile(r"\)")):
                raise ValueError("a group does not end")
        elif self._take(_LITERAL):
            size, choices = 1, 0.0
        else:
            raise ValueError("no pattern")
        repeat = self._take(_REPEAT)
        if repeat is None:
            return size, choices
        n_least = min(int(repeat[1]), MAX_REPEATED) if repeat[1] else 1
        n_least = max(n_least, 1)
        # The search fills a long run of one class with a few choices.
        n_chosen = min(n_least, math.log2(n_least) + 2 + n_least / 32) if is_class else n_least
        is_open = repeat[1] is None or repeat[2] is not None
        return n_least * size, n_chosen * choices + is_open

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._pattern, self._position)
        if match is not None:
            self._position = match.end()
        return match
