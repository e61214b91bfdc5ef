"""The measured time of a step, by the number of tokens in its batch."""

from bisect import bisect_left

MEMORY = 0.8  # weight of the past in the mean; picked
OUTLIER = 3.0  # a step that takes this many times the mean counts as this many; picked
EXACT_WIDTH = 16  # beyond it, widths are grouped
GROUP = 8
# What one more token is assumed to cost before it was measured, in steps of one token. Low, so
# that it is measured soon.
ASSUMED = 0.1
FORGET_STEPS = 4096  # a width that was not measured for so long is measured anew; picked


class StepCosts:
    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self._widths: list[int] = []  # that were measured, ascending
        self._n_steps = 0

    def observe(self, n_tokens: int, seconds: float) -> None:
        width = _group(n_tokens)
        self._n_steps += 1
        past = self._seconds.get(width)
        if past is None:
            self._widths.insert(bisect_left(self._widths, width), width)
            past = seconds
        self._seconds[width] = MEMORY * past + (1 - MEMORY) * min(seconds, OUTLIER * past)
        self._measured_at[width] = self._n_steps
        if self._n_steps % FORGET_STEPS == 0:
            self._forget()

    def ratio(self, n_tokens: int, n_base: int) -> float:
        """Return how much longer a step of `n_tokens` takes than one of `n_base`."""
        return self._cost(n_tokens) / self._cost(n_base)

    def _cost(self, n_tokens: int) -> float:
        """Return the seconds of a step; without any measurement, in steps of one token."""
        width = _group(n_tokens)
        known = self._seconds.get(width)
        if known is not None:
            return known
        place = bisect_left(self._widths, width)
        if place == 0:
            if not self._widths:
                return 1 + ASSUMED * (width - 1)
            return self._extended(self._widths[0], width)
        low = self._widths[place - 1]
        if place == len(self._widths):
            return self._extended(low, width)
        high = self._widths[place]
        share = (width - low) / (high - low)
        return (1 - share) * self._seconds[low] + share * self._seconds[high]

    def _extended(self, known: int, width: int) -> float:
        """Return the assumed cost of a width beyond those that were measured."""
        return self._seconds[known] * (1 + ASSUMED * (width - 1)) / (1 + ASSUMED * (known - 1))

    def _forget(self) -> None:
        self._widths = [
            width
            for width in self._widths
            if self._measured_at[width] > self._n_steps - FORGET_STEPS
        ]
        self._seconds = {width: self._seconds[width] for width in self._widths}


def _group(n_tokens: int) -> int:
    return n_tokens if n_tokens <= EXACT_WIDTH else -(-n_tokens // GROUP) * GROUP
