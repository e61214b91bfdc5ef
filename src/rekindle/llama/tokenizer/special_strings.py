"""Cuts a text so that llama.cpp finds its special strings in linear time.

llama.cpp searches the strings of special tokens first and keeps the pieces in a linked list. For
each string found it walks that list from its head, which takes quadratic time. A cut after a
special string changes no token, unless another special string crosses the cut or the beginning
of this one.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import groupby, pairwise
from operator import itemgetter
from os.path import commonprefix

from rekindle.errors import InvalidRequest
from rekindle.string_pattern import any_of

PART_STRINGS = 1_000  # in one call: 5 to 10 ms
# If no cut is possible, as in a run of line breaks with overlapping tokens: 1 s. See decision 0017.
MAX_STRINGS = 10_000
MAX_STRINGS_IN_ALL = 1_000_000  # of one text, in all its parts: 3 to 4 s
# llama.cpp compares every special string with every place of its first character: 20 ns each.
MAX_COMPARISONS = 500_000_000


class SpecialStrings:
    def __init__(self, strings: Collection[str], *, cuttable: Collection[str]) -> None:
        """`cuttable`: strings that do not change the text after them."""
        words = sorted(set(strings))
        self._pattern = re.compile(any_of(words) if words else "(?!)")
        self._cuttable = frozenset(cuttable)
        self._longest = max(map(len, words), default=0)
        self._n_by_first = Counter(word[0] for word in words)
        # Each special string begins with one of these: counting them is cheap.
        self._beginnings = tuple(
            commonprefix(list(group))  # noqa: RUF071 - strings, not paths
            for _, group in groupby(words, key=itemgetter(0))
        )

    def parts(self, text: str) -> list[str]:
        """Return parts of the text. Tokenised one by one, they give the tokens of the text."""
        if len(text) <= PART_STRINGS:
            return [text]
        if sum(n * text.count(first) for first, n in self._n_by_first.items()) > MAX_COMPARISONS:
            first = max(self._n_by_first, key=lambda each: self._n_by_first[each])
            raise InvalidRequest(
                f"The text has {first!r} {text.count(first):,} times. In this model's tokenizer,"
                f" {self._n_by_first[first]:,} special strings begin with it:"
                " searching for all of them would take too long. Send less text at once."
            )
        if sum(map(text.count, self._beginnings)) <= PART_STRINGS:
            return [text]
        edges = [0, *self._cuts(text), len(text)]
        return [text[i:j] for i, j in pairwise(edges) if i < j]

    def _cuts(self, text: str) -> Iterator[int]:
        n_strings = 0
        for n_in_all, match in enumerate(self._pattern.finditer(text), start=1):
            if n_in_all > MAX_STRINGS_IN_ALL:
                raise InvalidRequest(
                    f"The text has more than {MAX_STRINGS_IN_ALL:,} special strings of this model's"
                    f" tokenizer, such as {match[0][:40]!r}. Send fewer of them at once."
                )
            n_strings += 1
            if n_strings > MAX_STRINGS:
                raise InvalidRequest(
                    f"The text has more than {MAX_STRINGS:,} special strings of this model's"
                    f" tokenizer, such as {match[0][:40]!r}, and cannot be split between them."
                    " Send fewer of them, or put other text between them."
                )
            if n_strings >= PART_STRINGS and self._ends_cleanly(text, match):
                n_strings = 0
                yield match.end()

    def _ends_cleanly(self, text: str, match: re.Match[str]) -> bool:
        return match[0] in self._cuttable and not (
            self._reaches_over(text, match.start()) or self._reaches_over(text, match.end())
        )

    def _reaches_over(self, text: str, position: int) -> bool:
        for start in range(max(0, position - self._longest + 1), position):
            found = self._pattern.match(text, start)
            if found and found.end() > position:
                return True
        return False
