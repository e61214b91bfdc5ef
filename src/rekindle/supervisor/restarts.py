"""When to start an engine process again, and when it counts as hung or failed."""

from collections import Counter

from rekindle.generation.status import ProcessState
from rekindle.link.activity_page import Pulse
from rekindle.supervisor.process import Death

FAILED_DEATHS = 5  # in a row without one success; picked
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.25, 30.0


class Restarts:
    """Counts deaths. A success is any reply, token or answer of the engine."""

    def __init__(self) -> None:
        self.by_cause: Counter[str] = Counter()
        self.last_death: str | None = None
        self._n_in_row = 0

    def note_death(self, death: Death) -> None:
        self.by_cause[death.cause.value] += 1
        self.last_death = str(death)
        self._n_in_row += 1

    def note_failed_start(self, cause: str, message: str) -> None:
        self.by_cause[cause] += 1
        self.last_death = message
        self._n_in_row += 1

    def note_success(self) -> None:
        self._n_in_row = 0

    @property
    def state(self) -> ProcessState:
        has_failed = self._n_in_row >= FAILED_DEATHS
        return ProcessState.FAILED if has_failed else ProcessState.RESTARTING

    @property
    def delay_seconds(self) -> float:
        """Return how long to wait before the next start: the first one comes at once."""
        if self._n_in_row <= 1:
            return 0.0
        n_doublings = min(self._n_in_row - 2, 10)  # enough; a float ends at 1,023
        return min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0**n_doublings)


class HangWatch:
    """Notices an engine that should make steps and makes none.

    The watch counts its own looks instead of time: a machine that slept is not a hang.
    """

    def __init__(self, *, seconds: float, look_seconds: float) -> None:
        self._most_looks = seconds / look_seconds
        self._last = Pulse(0, 0, is_busy=False)
        self._n_without_step = 0
        self._n_without_beat = 0

    def is_hung(self, pulse: Pulse) -> bool:
        """Look at the engine. Return whether it has hung for too long."""
        is_stuck = pulse.is_busy and self._last.is_busy and pulse.n_steps == self._last.n_steps
        self._n_without_step = self._n_without_step + 1 if is_stuck else 0
        is_still = pulse.n_heartbeats == self._last.n_heartbeats
        self._n_without_beat = self._n_without_beat + 1 if is_still else 0
        self._last = pulse
        return max(self._n_without_step, self._n_without_beat) >= self._most_looks
