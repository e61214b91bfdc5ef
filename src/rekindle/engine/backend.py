"""Protocols of the backend that computes for the engine. llama.cpp's backend is in `llama`.

A slot is one of the backend's sequence ids. All slots share `n_cells` positions. An embedder
has a context of its own and cannot touch them.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from rekindle.generation.events import TokenSampled
from rekindle.generation.model_state import Payload, StateTraits
from rekindle.generation.request import Grammar, Sampling


class Sampler(Protocol):
    def forced_tokens(self) -> Sequence[int]:
        """Return the next tokens of the reply, as far as its grammar leaves no choice."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    n_slots: int
    n_cells: int
    n_ctx: int  # the most tokens of one sequence
    n_ubatch: int  # the most tokens that are computed at once
    logits_bytes: int  # of one row
    n_draft_rows: int  # the most drafted tokens of one batch; 0: none are wanted
    eog_tokens: frozenset[int]
    on_gpu: bool  # `decode` may return early, and logits need not be equal bit for bit
    traits: StateTraits  # final once `warm_up` has returned

    def decode(
        self,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        outputs: list[int],
    ) -> None:
        """Compute one batch. The caller must not change the lists afterwards.

        A batch may still run when this returns; `wait` waits for it, and so does whatever needs
        its rows. Raises ContextFull (nothing changed) or DecodeFailed.
        """
        ...

    def wait(self) -> None:
        """Wait until every batch is computed."""
        ...

    def sample(
        self, samplers: Sequence[Any], rows: Sequence[int]
    ) -> list[TokenSampled | Exception]:
        """Return one token per sampler, from the given rows of the last decode's outputs."""
        ...

    def logits(self, row: int) -> Payload:
        """Return a copy of one row of the last decode's outputs."""
        ...

    def sample_stored(self, sampler: Any, logits: Payload) -> TokenSampled | Exception:
        """Return the token that `sample` would return from a row with these logits."""
        ...

    def new_sampler(
        self,
        sampling: Sampling,
        tokens: Sequence[int],
        n_reply: int,
        n_top_logprobs: int | None,
        *,
        n_left: int = 0,
        is_landing: bool = False,
        state: tuple[float, ...] = (),
    ) -> Sampler:
        """Return a sampler for the token after `tokens`. Any thread may call it.

        The last `n_reply` tokens are the reply's. The sampler is in the state of one that has
        sampled them itself; `is_landing` says whether it forced the last one to end a call, and
        `state` is the `sampler_state` that came with the last one.
        After `n_left` more tokens the reply is cut off: a grammar with a `landing` ends before.
        Compiles the grammar if it is not known. Raises InvalidRequest.
        """
        ...

    def check_grammar(self, grammar: Grammar) -> None:
        """Compile the grammar. Raises InvalidRequest. Any thread may call it."""
        ...

    def compiles_quickly(self, grammar: Grammar) -> bool:
        """Return whether compiling the grammar takes a moment. Any thread may call it."""
        ...

    def prepare_grammars(self) -> None:
        """Do what the first grammar would wait for. Any thread may call it.

        It holds the GIL for up to a second: call it while no reply runs.
        """
        ...

    def clear_slot(self, slot: int) -> None: ...

    def can_trim(self, slot: int, n_keep: int) -> bool:
        """Return whether the slot can be trimmed to its first `n_keep` positions."""
        ...

    def trim_slot(self, slot: int, n_keep: int) -> None:
        """Drop all but the first `n_keep` positions. Only after `can_trim` returned True."""
        ...

    def drop_draft(self, slot: int, n_keep: int) -> None:
        """Drop positions that the last decode has added, all but the first `n_keep` of the slot.

        Only for models whose rows can be dropped.
        """
        ...

    def copy_slot(self, source: int, target: int) -> None:
        """Make the empty `target` equal to `source`; rows are shared, not copied."""
        ...

    def expect_exports(self, n_rows: int) -> None:
        """Announce the usual size of an export, so that memory can be allocated ahead."""
        ...

    def export_rows(self, slot: int, start: int, stop: int) -> Payload: ...

    def import_rows(self, slot: int, start: int, stop: int, rows: Payload) -> None:
        """Append positions [start, stop) to those that the slot holds.

        `rows` was exported for a range that covers these. Raises EngineError and empties the slot.
        """
        ...

    def export_checkpoint(self, slot: int) -> Payload: ...

    def import_checkpoint(self, slot: int, checkpoint: Payload) -> None:
        """Finish a restore. Raises EngineError and empties the slot."""
        ...

    @property
    def pays_for_holes(self) -> bool:
        """Whether attention also reads unused cells below the highest cell in use."""
        ...

    @property
    def has_room_to_move(self) -> bool: ...

    def move_down(self, slot: int, start: int = 0) -> None:
        """Move the slot's rows from `start` on to the lowest free cells. They must not be shared.

        Only if `has_room_to_move`. Raises DecodeFailed, after which no slot's rows are valid.
        """
        ...

    def warm_up(self) -> None:
        """Probe which state can be stored and set `traits`. First call on the engine thread."""
        ...

    def close(self) -> None: ...


class Embedder(Protocol):
    """Computes one input at a time, in parts. Other threads may read the two numbers."""

    n_ctx: int  # the longest input
    n_dimensions: int
    ranks: bool  # the model scores a text instead: a vector is one number

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a new input. Raises InvalidRequest if the model makes no embeddings."""
        ...

    def advance(self) -> bytes | None:
        """Compute the next part. Return the vector after the last one. Raises EngineError."""
        ...

    def rest(self) -> None:
        """Free the embedder's memory until the next input."""
        ...
