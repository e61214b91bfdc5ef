"""Decides when to compact live rows: when the holes of evicted slots have cost enough time."""

import logging
import time

from rekindle.cache.policy import Speed, should_park
from rekindle.engine.backend import Backend
from rekindle.engine.slots import Slots

_log = logging.getLogger(__name__)

FIRST_GUESS_SECONDS = 1e-6  # estimate per row before the first move; measured on an H200
MIN_HOLE_SHARE = 0.1  # share of the cells in use; fewer holes are ignored; picked


class Compaction:
    def __init__(self, backend: Backend, slots: Slots) -> None:
        self._backend = backend
        self._slots = slots
        self._n_reached = 0
        self._cost_seconds = 0.0
        self._speed = Speed()

    @property
    def n_attended(self) -> int:
        """The number of cells that attention reads: with holes, about the most ever in use."""
        n_used = self._slots.n_cells_used
        if not self._backend.pays_for_holes:
            return n_used
        self._n_reached = max(self._n_reached, n_used)
        return self._n_reached

    def observe_step(self, seconds_per_cell: float) -> None:
        """Add what the holes cost in one step of decodes."""
        n_used = self._slots.n_cells_used
        n_holes = self.n_attended - n_used
        if n_holes > MIN_HOLE_SHARE * n_used:
            self._cost_seconds += seconds_per_cell * n_holes

    @property
    def is_due(self) -> bool:
        return self._cost_seconds > 0 and should_park(self._cost_seconds, self._seconds_to_move())

    def move(self) -> None:
        """Move the rows of every slot to the lowest cells. Raises DecodeFailed."""
        self._cost_seconds = 0.0
        slots = [slot for slot in self._slots.all if slot.n_rows]
        # A move would copy shared rows once per slot, and there may be no room for that.
        is_shared = any(self._slots.own_cells(slot) < slot.n_rows for slot in slots)
        if is_shared or not self._backend.has_room_to_move:
            return
        began = time.perf_counter()
        for slot in slots:
            self._backend.move_down(slot.id)
        n_rows, seconds = self._slots.n_cells_used, time.perf_counter() - began
        self._speed.observe(n_rows, seconds)
        _log.debug("engine: compacted holes=%d ms=%.0f", self._n_reached - n_rows, 1e3 * seconds)
        self._n_reached = n_rows

    def _seconds_to_move(self) -> float:
        n_rows = self._slots.n_cells_used
        return self._speed.seconds(n_rows) or n_rows * FIRST_GUESS_SECONDS
