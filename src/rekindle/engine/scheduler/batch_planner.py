"""Plans the tokens of the next batch. Pure: no clock and no backend."""

from collections.abc import Iterable
from typing import NamedTuple

from rekindle.engine.sequence import DECODING, PREFILLING, Sequence

# Chunks of whole grains give bit-equal rows on a CPU. Smaller chunks do not, nor do the last few
# rows of a chunk whose length is not a multiple of 4. Attention works in tiles of 64 rows; in a
# plain llama.cpp, a remainder costs a tile of its own.
PREFILL_GRAIN = 64

# What a token of a small batch costs for each cell before it, in tokens of full tiles. 2.4 were
# measured on a Neoverse N1 with a model of 135M and a plain llama.cpp; doubled, because the batch
# itself costs too. With our patch (scripts/llama_cpp) the cuts make hardly a difference.
SMALL_BATCH_COST = 5
WORTH_A_BATCH = 2**15  # pairs of token and cell; picked

# Tokens that a GPU computes at nearly its full speed; measured on an H200. One prompt may have more
# in a batch, if no stream waits for it.
ENOUGH_ON_GPU = 1024
MORE_TO_END = 128  # more that may join, if a prompt ends with them; picked
FIRST_ON_GPU = 512  # in a batch before a speed is known; picked

# How long a prefill chunk may delay the streams in the same batch; picked.
STALL_SECONDS = 0.25

# How long a step may take while no stream runs: a slow machine must not look like a hang. Picked.
LONGEST_STEP_SECONDS = 10.0


class BatchLimits(NamedTuple):
    max_tokens: int  # in one batch, of all kinds
    max_prefill: int  # of these, prefill tokens while any sequence decodes
    n_free_cells: int
    grain: int  # a chunk that does not end a prompt has a multiple of so many tokens
    enough: int  # prefill tokens that use the machine well: prompts join each other up to them


class BatchItem(NamedTuple):
    sequence: Sequence
    n_tokens: int


def plan_batch(sequences: Iterable[Sequence], limits: BatchLimits) -> list[BatchItem]:
    """Plan decodes first: each costs one token, and a reader watches it stream.

    Prefills get the remaining room, oldest first. `sequences` come oldest first. In the batch
    itself, prefills stand first: attention works in tiles of 64 rows, and a decode in front of a
    chunk would push the chunk over one more tile (a fifth slower at depth 3,000).
    """
    decoding, prefilling = [], []
    for sequence in sequences:
        if sequence.phase is DECODING:
            decoding.append(BatchItem(sequence, 1))
        elif sequence.phase is PREFILLING:
            prefilling.append(sequence)
    room = min(limits.max_tokens, limits.n_free_cells)
    decoding = decoding[:room]
    if not prefilling:
        return decoding
    room -= len(decoding)
    if decoding:
        room = min(room, limits.max_prefill)
    plan: list[BatchItem] = []
    n_planned = 0
    for sequence in prefilling:
        if sequence.n_pending == 0:
            continue  # it waits for its sampler
        n_most = room
        if n_planned:
            n_most = min(room, _room_to_join(sequence, limits.enough - n_planned))
        n_tokens = _chunk(sequence, n_most, limits.grain)
        if n_tokens <= 0:
            break
        plan.append(BatchItem(sequence, n_tokens))
        n_planned += n_tokens
        room -= n_tokens
    return plan + decoding


def prefill_allowance(
    seconds_per_token: float, n_ubatch: int, seconds: float = STALL_SECONDS
) -> int:
    """Return how many prefill tokens fit into the time that a stream may be delayed."""
    if seconds_per_token <= 0:
        return n_ubatch
    affordable = int(seconds / seconds_per_token) // PREFILL_GRAIN * PREFILL_GRAIN
    return max(min(PREFILL_GRAIN, n_ubatch), min(affordable, n_ubatch))


def first_chunk(n_start: int, n_end: int, n_ubatch: int) -> int:
    """Return how many of the tokens between should be computed first; 0: as many as fit.

    On a CPU, attention works in tiles of 64 tokens and 64 cells. A batch that is not full leaves
    tiles half empty, which costs more the more cells are before it: so the odd batch comes first.
    A few tokens more than whole tiles are computed alone.
    """
    n_full, n_odd = divmod(n_end - n_start, n_ubatch)
    if n_full == 0:
        n_over = n_odd % PREFILL_GRAIN
        saved = n_start * (PREFILL_GRAIN - SMALL_BATCH_COST * n_over)
        return n_over if n_odd > PREFILL_GRAIN and saved > WORTH_A_BATCH else 0
    if n_start % PREFILL_GRAIN == 0:
        return 0
    # Full batches that start inside a tile read one tile more for each of theirs.
    n_over = n_end % PREFILL_GRAIN
    saved = n_full * n_ubatch * PREFILL_GRAIN - SMALL_BATCH_COST * n_over * n_end
    return n_odd - n_over if n_over < n_odd and saved > 0 else n_odd


def _room_to_join(sequence: Sequence, n_left: int) -> int:
    """Return how many tokens may join others in a batch, whose first tokens then come later.

    `n_left`: until the batch has enough.
    """
    ends = n_left > 0 and sequence.n_pending <= n_left + MORE_TO_END
    return sequence.n_pending if ends else n_left


def _chunk(sequence: Sequence, room: int, grain: int) -> int:
    """Return the length of the next chunk: up to the next stop, or as many whole grains as fit.

    A batch smaller than a grain takes as many tokens as fit.
    """
    stop = sequence.stops[-1] if sequence.stops else len(sequence.tokens)
    n_pending = stop - sequence.n_computed
    if n_pending <= room:
        return n_pending
    return room // grain * grain or (room if room < grain else 0)
