"""Whether the holes that slots left behind have cost so much that rows should move together."""

import logging
import time

from rekindle.cache.policy import Speed, should_park
from rekindle.engine.backend import Backend
from rekindle.engine.slots import Slots

_log = logging.getLogger(__name__)

FIRST_GUESS_SECONDS = 1e-6  # for a row, until some were moved; picked: measured on an H200
MIN_HOLE_SHARE = 0.1  # of the cells in use; less is not worth a look; picked


class Compaction:
    def __init__(self, backend: Backend, slots: Slots) -> None:
        self._backend = backend
        self._slots = slots
        self._n_reached = 0
        self._tax_seconds = 0.0
        self._speed = Speed()

    @property
    def n_attended(self) -> int:
        """The cells that attention goes over: with holes, about the most that were ever used."""
        n_used = self._slots.n_cells_used
        if not self._backend.pays_for_holes:
            return n_used
        self._n_reached = max(self._n_reached, n_used)
        return self._n_reached

    def observe_step(self, seconds_per_cell: float) -> None:
        """One step of streams alone."""
        n_used = self._slots.n_cells_used
        n_holes = self.n_attended - n_used
        if n_holes > MIN_HOLE_SHARE * n_used:
            self._tax_seconds += seconds_per_cell * n_holes

    @property
    def is_due(self) -> bool:
        return self._tax_seconds > 0 and should_park(self._tax_seconds, self._seconds_to_move())

    def move(self) -> None:
        """Raises DecodeFailed."""
        self._tax_seconds = 0.0
        slots = [slot for slot in self._slots.all if slot.n_rows]
        # Rows that slots share would be doubled, and room for that may not be there.
        is_shared = any(self._slots.own_cells(slot) < slot.n_rows for slot in slots)
        if is_shared or not self._backend.has_room_to_move:
            return
        began = time.perf_counter()
        for slot in slots:
            self._backend.move_down(slot.id)
        n_rows, seconds = self._slots.n_cells_used, time.perf_counter() - began
        self._speed.observe(n_rows, seconds)
        _log.debug("closed %d holes in %.0f ms", self._n_reached - n_rows, 1e3 * seconds)
        self._n_reached = n_rows

    def reset(self) -> None:
        """Every slot is empty."""
        self._n_reached, self._tax_seconds = 0, 0.0

    def _seconds_to_move(self) -> float:
        n_rows = self._slots.n_cells_used
        return self._speed.seconds(n_rows) or n_rows * FIRST_GUESS_SECONDS
