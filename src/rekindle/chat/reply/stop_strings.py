"""Stop strings in a text that streams."""

from operator import itemgetter
from typing import NamedTuple


class Scan(NamedTuple):
    text: str  # safe to show
    stop: str | None = None  # the stop string that was found after the text
    n_cut: int = 0  # characters from the stop string on


class StopScanner:
    """Holds back text that may be the beginning of a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    @property
    def holds_text(self) -> bool:
        return bool(self._held)

    def feed(self, text: str) -> Scan:
        if not self._stops:
            return Scan(text)
        text = self._held + text
        self._held = ""
        found = [(index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            index, stop = min(found, key=itemgetter(0))
            return Scan(text[:index], stop, len(text) - index)
        n_held = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - n_held :]
        return Scan(text[: len(text) - n_held])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` begin `mark`, without completing it."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
