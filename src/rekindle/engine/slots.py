"""Slots, what each of them holds, and how many cells that takes.

A slot outlives the sequence that filled it: idle slots keep their rows until someone needs the
room. Slots that were forked from each other share cells, which count once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from rekindle.cache.keys import PrefixKeys
from rekindle.engine.sequence import Sequence
from rekindle.generation.request import USUAL_TERMS, CacheTerms, Rank

# Room that a newcomer must find beyond its prompt, for each sequence that will be running:
# without it two long replies would chase each other out of the context. Picked.
GROWTH_CELLS = 64


# tokens   |--- n_saved ---|--- to be exported ---|
#          0                                    n_rows
@dataclass(slots=True, eq=False)
class Slot:
    id: int
    sequence: Sequence | None = None  # None: idle
    keys: PrefixKeys | None = None  # of the tokens whose rows it holds; None: it is empty
    n_kept_rows: int = 0  # while idle
    n_saved: int = 0  # leading rows that need no export any more
    n_previous_turn_rows: int = (
        0  # leading rows of the turns before this one: owed although no block ends here
    )
    n_checkpoint: int = 0  # position of the last checkpoint that was taken of it
    terms: CacheTerms = USUAL_TERMS  # of its last request
    n_prompt: int = 0  # of its last request
    rank: Rank = Rank.MAIN  # of the dearest conversation whose rows it holds
    was_reused: bool = False  # what it holds began with rows that were there before
    evicted_rows_rechecked: bool = (
        False  # since its last turn: what was evicted is to be stored again
    )
    export_waits_since: float | None = None  # when exports of it first had to wait
    last_used_at: float = 0.0
    cost_seconds: float = 0.0  # what its rows cost the others since then
    reload_seconds: float | None = None  # once its rows are stored

    @property
    def n_rows(self) -> int:
        return self.n_kept_rows if self.sequence is None else self.sequence.n_computed

    @property
    def is_idle(self) -> bool:
        return self.sequence is None and self.n_kept_rows > 0

    @property
    def is_empty(self) -> bool:
        return self.sequence is None and self.n_kept_rows == 0


@dataclass(slots=True)
class Slots:
    n_slots: int
    n_cells: int
    rows_take_cells: bool = True  # not those of a recurrent model: its state is all there is
    all: list[Slot] = field(init=False)
    _cells: "_SharedCells" = field(init=False)

    def __post_init__(self) -> None:
        self.all = [Slot(number) for number in range(self.n_slots)]
        self._cells = _SharedCells(self.n_slots)

    @property
    def n_cells_used(self) -> int:
        if not self.rows_take_cells:
            return 0
        return sum(slot.n_rows for slot in self.all) - self._cells.n_shared

    @property
    def n_cells_free(self) -> int:
        return self.n_cells - self.n_cells_used

    def cells_of(self, slots: Iterable[Slot]) -> int:
        """How many cells these slots hold between them."""
        if not self.rows_take_cells:
            return 0
        slots = list(slots)
        shared = self._cells.shared_among([slot.id for slot in slots])
        return sum(slot.n_rows for slot in slots) - shared

    def own_cells(self, slot: Slot, *, beside: Iterable[Slot] | None = None) -> int:
        """How many cells no other slot holds, or none of those `beside` it."""
        others = self.all if beside is None else beside
        return slot.n_rows - self._cells.shared_with_one(slot.id, [other.id for other in others])

    def idle(self) -> list[Slot]:
        """Those of side requests before those of conversations, least recently used first."""
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

    def forget(self, slot: Slot) -> None:
        """The slot is empty from now on."""
        self._cells.cut(slot.id, 0)
        slot.sequence = None
        slot.keys = None
        slot.n_kept_rows = slot.n_saved = slot.n_previous_turn_rows = slot.n_checkpoint = 0
        slot.cost_seconds = 0.0
        slot.export_waits_since = None
        slot.evicted_rows_rechecked = False
        slot.was_reused = False
        slot.terms, slot.n_prompt, slot.rank = USUAL_TERMS, 0, Rank.MAIN


class _SharedCells:
    """How many leading cells each two slots have in common.

    Prefixes that were forked form a tree, so what a slot shares with all earlier ones together
    is what it shares with one of them.
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
