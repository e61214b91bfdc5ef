"""Which slots are free, and how many cells the running sequences take or are about to take."""

from rekindle.engine.sequence import Sequence

# Room that a newcomer must find beyond its prompt, for each sequence that will be running:
# without it two long replies would chase each other out of the context. Picked.
GROWTH_CELLS = 64


class Slots:
    def __init__(self, n_slots: int, n_cells: int) -> None:
        self.n_cells = n_cells
        self._free = list(range(n_slots))[::-1]

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        assert slot not in self._free
        self._free.append(slot)

    def can_admit(self, newcomer: Sequence, running: list[Sequence]) -> bool:
        if not self._free:
            return False
        if not running:
            return True
        promised = sum(len(sequence.tokens) for sequence in running)
        growth = GROWTH_CELLS * (len(running) + 1)
        return promised + len(newcomer.tokens) + growth <= self.n_cells
