"""Probes at load what can be stored for a model, by saving and restoring a few tokens.

llama.cpp has more kinds of memory than its API distinguishes. State that it cannot restore is
often restored wrongly, without an error. State is stored only if this probe succeeds.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rekindle.errors import EngineError
from rekindle.generation.model_state import ModelClass, StateTraits
from rekindle.llama.model import ModelFacts
from rekindle.llama.state import HEADER_BYTES, PARTIAL, WHOLE, SlotMemory, StateAccess

NOT_PROBED = StateTraits(
    ModelClass.OPAQUE,
    has_rows=False,
    has_checkpoints=False,
    off_because="The model has not been probed yet.",
)

_SLOT = 0


def probe(
    memory: SlotMemory,
    facts: ModelFacts,
    tokens: list[int],
    decode: Callable[[list[int]], None],
) -> tuple[StateAccess, StateTraits]:
    """Return access to the state, and its traits. `decode` fills slot 0.

    Slot 0 must be empty. Slot 0 and the scratch sequence are empty afterwards.
    """
    decode(tokens)
    state, traits = StateAccess(memory, ModelClass.OPAQUE), NOT_PROBED
    try:
        model_class = _classify(memory, facts)
        # Not before the class is known: copying a range crashes with some opaque models.
        blank = _blank_partial(memory, model_class, len(tokens))
        state = StateAccess(memory, model_class, blank)
        traits = StateTraits(model_class, state.has_rows, state.has_checkpoints)
        before = memory.read(_SLOT, WHOLE)
        row_bytes = _round_trip(memory, state, tokens, decode)
        if not np.array_equal(before, memory.read(_SLOT, WHOLE)):
            raise EngineError("the restored state differs from the saved one.")
        memory.clear(_SLOT)
        traits = replace(traits, row_bytes=row_bytes)
    except EngineError as error:
        off_because = f"The state of this model cannot be saved and restored: {error.message}"
        traits = replace(traits, off_because=off_because)
        memory.clear_all()
    return state, traits


def _classify(memory: SlotMemory, facts: ModelFacts) -> ModelClass:
    whole, partial = memory.read(_SLOT, WHOLE), memory.read(_SLOT, PARTIAL)
    if np.array_equal(whole, partial):
        if facts.is_hybrid:
            return ModelClass.OPAQUE
        return ModelClass.RECURRENT if facts.is_recurrent else ModelClass.DENSE
    tail = partial[HEADER_BYTES:]
    if len(tail) > len(whole) or not np.array_equal(whole[-len(tail) :], tail):
        return ModelClass.OPAQUE
    if facts.is_hybrid:
        return ModelClass.HYBRID
    return ModelClass.SLIDING_WINDOW if facts.n_swa > 0 else ModelClass.OPAQUE


def _blank_partial(memory: SlotMemory, model_class: ModelClass, n_tokens: int) -> bytes:
    """Return a partial blob with no recurrent state and a single cell of a window.

    Writing a window without cells would be skipped, and the old window would stay.
    """
    if model_class not in (ModelClass.SLIDING_WINDOW, ModelClass.HYBRID):
        return b""
    scratch = memory.scratch
    nothing = memory.read(scratch, PARTIAL)
    memory.copy(_SLOT, scratch, n_tokens - 1, n_tokens)
    try:
        memory.write(scratch, nothing.data, PARTIAL)
        return memory.read(scratch, PARTIAL).tobytes()
    finally:
        memory.clear(scratch)


def _round_trip(
    memory: SlotMemory,
    state: StateAccess,
    tokens: list[int],
    decode: Callable[[list[int]], None],
) -> int:
    """Save the slot, overwrite its cells, and restore it, as the cache does.

    Return the bytes of one position's rows.
    """
    first = len(tokens) // 4 or len(tokens) // 2  # two sizes, from which all others follow
    ranges = [(0, first), (first, len(tokens))] if state.has_rows else []
    rows = [state.export_rows(_SLOT, start, stop) for start, stop in ranges]
    checkpoint = state.export_checkpoint(_SLOT) if state.has_checkpoints else None
    memory.clear(_SLOT)
    decode(tokens[::-1])
    memory.clear(_SLOT)
    for (start, stop), payload in zip(ranges, rows, strict=True):
        state.import_rows(_SLOT, start, stop, payload)
    if checkpoint is not None:
        state.import_checkpoint(_SLOT, checkpoint)
    return sum(map(len, rows)) // len(tokens)
