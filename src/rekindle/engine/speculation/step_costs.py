"""The measured time of a step, by the number of tokens in its batch, and of sampling a token."""

from bisect import bisect_left

MEMORY = 0.8  # weight of the past in the mean; picked
OUTLIER = 3.0  # a step that takes this many times the mean counts as this many; picked
# What one more token is assumed to cost before it was measured, in steps of one token. Low, so
# that it is measured soon.
ASSUMED = 0.1
STALE_STEPS = 64  # after which a step without drafts is measured again; picked
FORGET_STEPS = 4096  # after which the cost of a width is forgotten and tried again; picked


class StepCosts:
    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self._widths: list[int] = []  # that were measured, ascending
        self._n_steps = 0
        self._sampling = 0.0  # seconds per token

    def observe(self, n_tokens: int, seconds: float) -> None:
        self._n_steps += 1
        past = self._seconds.get(n_tokens)
        if past is None:
            self._widths.insert(bisect_left(self._widths, n_tokens), n_tokens)
            past = seconds
        self._seconds[n_tokens] = _mean(past, seconds)
        self._measured_at[n_tokens] = self._n_steps
        if self._n_steps % FORGET_STEPS == 0:
            self._forget()

    def observe_sampling(self, n_tokens: int, seconds: float) -> None:
        per_token = seconds / n_tokens
        self._sampling = _mean(self._sampling or per_token, per_token)

    def is_stale(self, n_tokens: int) -> bool:
        """Return whether a step of so many tokens was not measured for a while."""
        return self._n_steps - self._measured_at.get(n_tokens, -STALE_STEPS) >= STALE_STEPS

    def ratio(self, n_base: int, n_drafted: int, n_accepted: float) -> float:
        """Return how much longer a step of `n_base` sequences takes with drafted tokens."""
        base = self._cost(n_base) + self._sampling * n_base
        return (self._cost(n_base + n_drafted) + self._sampling * (n_base + n_accepted)) / base

    def _cost(self, width: int) -> float:
        """Return the seconds of a step; without any measurement, in steps of one token."""
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


def _mean(past: float, now: float) -> float:
    return MEMORY * past + (1 - MEMORY) * min(now, OUTLIER * past)
