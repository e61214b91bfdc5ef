"""The time that one step of the engine may spend on work for which no token waits."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

STEP_SECONDS = 0.020  # for questions and exports; running streams wait that much longer; picked


class StepTime:
    """Exports and questions share it. Work that does not fit continues in the next step.

    The limit also counts while nothing runs: a new request waits for the end of the step.
    """

    def __init__(self) -> None:
        self._left_seconds = STEP_SECONDS

    def renew(self) -> None:
        self._left_seconds = STEP_SECONDS

    @property
    def is_over(self) -> bool:
        return self._left_seconds <= 0

    @property
    def is_half_over(self) -> bool:
        return self._left_seconds <= STEP_SECONDS / 2

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Count the time of the block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._left_seconds -= time.perf_counter() - began
