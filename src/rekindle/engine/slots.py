"""Slots, the rows that each slot holds, and the cells that these rows take.

A slot outlives the sequence that filled it: an idle slot keeps its rows until it is evicted.
Forked slots share cells, which count once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from rekindle.cache.keys import PrefixKeys
from rekindle.engine.sequence import Sequence
from rekindle.generation.model_state import Payload
from rekindle.generation.request import USUAL_TERMS, CacheTerms, Rank

# Free cells that a new sequence must find beyond its prompt, for each running sequence. Without
# them, two long replies would preempt each other again and again. Picked.
GROWTH_CELLS = 64


@dataclass(slots=True, eq=False)
class PromptEnd:
    """The logits after a prompt: with them, the same prompt needs no computation at all."""

    logits: Payload
    is_saved: bool = False


MAX_ENDS = 4  # of a slot: those that are not stored yet, and the last one. Picked.


# tokens   |--- n_saved ---|--- to be exported ---|
#          0                                    n_rows
@dataclass(slots=True, eq=False)
class Slot:
    id: int
    sequence: Sequence | None = None  # None: idle
    keys: PrefixKeys | None = None  # of the tokens whose rows are held; None: empty
    n_kept_rows: int = 0  # rows held while idle
    n_saved: int = 0  # leading rows that are exported
    # Leading rows of earlier turns: exported even though no block ends here.
    n_previous_turn_rows: int = 0
    n_checkpoint: int = 0  # position of the slot's last checkpoint
    ends: dict[int, PromptEnd] = field(default_factory=dict)  # by length of the prompt, ascending
    terms: CacheTerms = USUAL_TERMS  # of the last request
    unpinned: tuple[CacheTerms, ...] = ()  # of earlier requests, whose rows are not stored yet
    n_prompt: int = 0  # of the last request
    rank: Rank = Rank.MAIN  # lowest rank of the requests whose rows are held
    was_reused: bool = False  # the last request started from cached rows
    evicted_rows_rechecked: bool = False  # since the last turn
    export_waits_since: float | None = None  # when an export was first delayed
    last_used_at: float = 0.0
    cost_seconds: float = 0.0  # slowdown of other sequences by the slot's idle rows
    reload_seconds: float | None = None  # estimate for a restore of the slot's rows

    @property
    def n_rows(self) -> int:
        return self.n_kept_rows if self.sequence is None else self.sequence.n_computed

    def keep_end(self, n_prompt: int, end: PromptEnd) -> None:
        ends = {n: each for n, each in self.ends.items() if n < n_prompt and not each.is_saved}
        self.ends = dict([*ends.items(), (n_prompt, end)][-MAX_ENDS:])

    def ends_within(self, n_rows: int) -> dict[int, PromptEnd]:
        """Return the ends that stay valid if only so many rows are kept."""
        return {n: end for n, end in self.ends.items() if n <= n_rows}

    @property
    def unsaved_end(self) -> int | None:
        return next((n for n, end in self.ends.items() if not end.is_saved), None)

    @property
    def is_idle(self) -> bool:
        return self.sequence is None and self.n_kept_rows > 0

    @property
    def is_empty(self) -> bool:
        return self.sequence is None and self.n_kept_rows == 0


class Slots:
    def __init__(self, n_slots: int, n_cells: int) -> None:
        self.n_cells = n_cells
        self.rows_take_cells = True  # False for a recurrent model, which has a state and no rows
        self.all = [Slot(number) for number in range(n_slots)]
        # Grows when a sequence may fit that did not before: rows were dropped or exported, or a
        # sequence has left its slot.
        self.n_changes = 0
        self._cells = _SharedCells(n_slots)

    @property
    def n_cells_used(self) -> int:
        if not self.rows_take_cells:
            return 0
        return sum(slot.n_rows for slot in self.all) - self._cells.n_shared

    @property
    def n_cells_free(self) -> int:
        return self.n_cells - self.n_cells_used

    def cells_of(self, slots: Iterable[Slot]) -> int:
        """Return how many cells these slots hold together."""
        if not self.rows_take_cells:
            return 0
        slots = list(slots)
        shared = self._cells.shared_among([slot.id for slot in slots])
        return sum(slot.n_rows for slot in slots) - shared

    def own_cells(self, slot: Slot, *, beside: Iterable[Slot] | None = None) -> int:
        """Return how many cells only this slot holds, among all slots or those in `beside`."""
        others = self.all if beside is None else beside
        return slot.n_rows - self._cells.shared_with_one(slot.id, [other.id for other in others])

    def idle(self) -> list[Slot]:
        """Return idle slots in order of eviction: side requests first, then least recently used."""
        return sorted(
            (slot for slot in self.all if slot.is_idle),
            key=lambda slot: (-slot.rank, slot.last_used_at),
        )

    def empty(self) -> Slot | None:
        return next((slot for slot in self.all if slot.is_empty), None)

    def fork(self, source: Slot, target: Slot, n_tokens: int) -> None:
        self._cells.fork(source.id, target.id, n_tokens)

    def cut(self, slot: Slot, n_keep: int) -> None:
        self._cells.cut(slot.id, n_keep)
        self.n_changes += 1

    def forget(self, slot: Slot) -> None:
        """Mark the slot as empty."""
        self.cut(slot, 0)
        slot.sequence = None
        slot.keys = None
        slot.n_kept_rows = slot.n_saved = slot.n_previous_turn_rows = slot.n_checkpoint = 0
        slot.ends = {}
        slot.unpinned = ()
        slot.cost_seconds = 0.0
        slot.export_waits_since = None
        slot.evicted_rows_rechecked = False
        slot.was_reused = False
        slot.terms, slot.n_prompt, slot.rank = USUAL_TERMS, 0, Rank.MAIN


class _SharedCells:
    """The number of leading cells that each pair of slots has in common.

    Forked prefixes form a tree, so the cells that a slot shares with a group of slots are those
    that it shares with one slot of the group.
    """

    def __init__(self, n_slots: int) -> None:
        self._common = np.zeros((n_slots, n_slots), dtype=np.int64)
        self.n_shared = 0

    def fork(self, source: int, target: int, n_cells: int) -> None:
        common = np.minimum(self._common[source], n_cells)
        common[source] = n_cells
        common[target] = 0
        self._common[target, :] = common
        self._common[:, target] = common
        self._count()

    def cut(self, slot: int, n_keep: int) -> None:
        if not self.n_shared:
            return
        common = np.minimum(self._common[slot], n_keep)
        self._common[slot, :] = common
        self._common[:, slot] = common
        self._count()

    def shared_among(self, slots: list[int]) -> int:
        if len(slots) < 2:
            return 0
        return int(np.tril(self._common[np.ix_(slots, slots)], -1).max(axis=1).sum())

    def shared_with_one(self, slot: int, others: list[int]) -> int:
        return int(self._common[slot, others].max(initial=0))

    def _count(self) -> None:
        self.n_shared = int(np.tril(self._common, -1).max(axis=1).sum())
