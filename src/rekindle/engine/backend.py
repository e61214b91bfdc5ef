"""What the engine needs of whatever computes: a dozen verbs. llama.cpp's version is in `llama`.

A slot is one of the backend's sequence ids. All slots share `n_cells` positions. An embedder
has a context of its own, so nothing it does can touch them.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from rekindle.generation.events import TokenSampled
from rekindle.generation.model_state import Payload, StateTraits
from rekindle.generation.request import Grammar, Sampling


class Sampler(Protocol):
    def close(self) -> None: ...


class Backend(Protocol):
    n_slots: int
    n_cells: int
    n_ctx: int  # the longest a single sequence may grow
    n_ubatch: int  # tokens that are computed in one go
    eog_tokens: frozenset[int]
    traits: StateTraits  # true once `warm_up` has returned

    def decode(
        self,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        outputs: list[int],
    ) -> None:
        """Computes one batch; the lists are the backend's to keep.

        Raises ContextFull (nothing changed) or DecodeFailed.
        """
        ...

    def sample(
        self, samplers: Sequence[Any], rows: Sequence[int]
    ) -> list[TokenSampled | Exception]:
        """One token per sampler, from the given rows of the last decode's outputs."""
        ...

    def new_sampler(
        self, sampling: Sampling, prompt: tuple[int, ...], n_top_logprobs: int | None
    ) -> Sampler: ...

    def check_grammar(self, grammar: Grammar) -> None:
        """Any thread may call this one."""
        ...

    def clear_slot(self, slot: int) -> None: ...

    def clear_all(self) -> None:
        """Forgets every row of every slot, also those a failed decode left in disorder."""
        ...

    def can_trim(self, slot: int, n_keep: int) -> bool:
        """Whether the slot can be cut back to its first `n_keep` positions."""
        ...

    def trim_slot(self, slot: int, n_keep: int) -> None:
        """Only after `can_trim` said yes."""
        ...

    def copy_slot(self, source: int, target: int) -> None:
        """Makes the empty `target` equal to `source`; rows are shared, not duplicated."""
        ...

    def expect_exports(self, n_rows: int) -> None:
        """Most exports will be of so many rows: memory for them may be made ahead."""
        ...

    def export_rows(self, slot: int, start: int, stop: int) -> Payload: ...

    def import_rows(self, slot: int, start: int, stop: int, rows: Payload) -> None:
        """Adds positions [start, stop) behind those the slot holds.

        `rows` was exported for a range that covers these. Raises EngineError, and then the slot
        is empty.
        """
        ...

    def export_checkpoint(self, slot: int) -> Payload: ...

    def import_checkpoint(self, slot: int, checkpoint: Payload) -> None:
        """The last step of a restore. Raises EngineError, and then the slot is empty."""
        ...

    @property
    def pays_for_holes(self) -> bool:
        """Whether cells below the highest in use cost time even when nobody uses them."""
        ...

    @property
    def has_room_to_move(self) -> bool: ...

    def move_down(self, slot: int) -> None:
        """Moves its rows to the lowest free cells; it shares none with another slot.

        Only where there is room. Raises DecodeFailed, and then nobody's rows are sure.
        """
        ...

    def warm_up(self) -> None:
        """The first call on the engine thread: probes what can be stored, sets `traits`."""
        ...

    def close(self) -> None: ...


class Embedder(Protocol):
    """Computes one input at a time, in parts. For the engine thread, but for the two numbers."""

    n_ctx: int  # the longest input
    n_dimensions: int

    def begin(self, tokens: Sequence[int]) -> None:
        """Forgets the input before it. Raises InvalidRequest if the model makes no embeddings."""
        ...

    def advance(self) -> bytes | None:
        """Computes the next part; after the last one, the vector. Raises EngineError."""
        ...

    def rest(self) -> None:
        """Gives its memory back until the next input."""
        ...
