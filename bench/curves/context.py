"""Context: a prompt is built, tokenised and looked up; rows are restored and exported.

The prompt is that of a tool loop, about 1,000 tokens a turn. The rows are those of a tiny model,
1 KiB a token, moved in blocks of 256 tokens as the engine moves them.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from bench.curves.curve import (
    BYTES,
    LINEAR,
    MILLISECONDS,
    Curve,
    Measured,
    cpu_milliseconds,
    curves_of,
)
from bench.engine_run import context_params
from bench.lookup import match_in, prompt_of, stored_blocks
from bench.prompt_building import TOKENS_PER_TURN, WORDS, AgentChat, answered, begun
from rekindle.cache.entry import BLOCK_TOKENS
from rekindle.cache.index import PrefixIndex, Where
from rekindle.cache.turns.recent import MemoryTurns
from rekindle.generation.forgetting import Tombstones
from rekindle.llama.context import LlamaBackend
from rekindle.llama.model import GgufModel
from rekindle.models.source import resolve_model
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

NAME = "context"
ABOUT = "tokens of a prompt"
SIZES = (1_024, 4_096, 16_384, 65_536, 262_144)
QUICK_SIZES = (1_024, 2_048)
N_BUILDS = 3  # of the last turns, the fastest counts
HEADER_BYTES = 16  # of a blob of rows: magic, sequence, number of streams, number of cells
CELL_BYTES = 12  # position, number of sequences, the sequence
BUILD, TOKENISE, LOOK_UP = "build the next prompt", "tokenise a text", "look up"
RESTORE, EXPORT, ROWS = "restore rows", "export rows", "bytes of rows"
MEASURES = (
    Measured(BUILD, MILLISECONDS, LINEAR),
    Measured(TOKENISE, MILLISECONDS, LINEAR),
    Measured(LOOK_UP, MILLISECONDS, LINEAR),
    Measured(RESTORE, MILLISECONDS, LINEAR),
    Measured(EXPORT, MILLISECONDS, LINEAR),
    Measured(ROWS, BYTES, LINEAR),
)


def measure(sizes: Sequence[int]) -> list[Curve]:
    values: dict[int, dict[str, float]] = {n_tokens: {} for n_tokens in sizes}
    with closing(GgufModel(resolve_model(None).path, gpu_layers=0)) as model:
        builds = _build_milliseconds(AgentChat(model.vocabulary), sizes)
        for n_tokens, build_ms in zip(sizes, builds, strict=True):
            text = WORDS * (n_tokens // len(WORDS.split()))
            tokenise = partial(model.vocabulary.tokenize, text, parse_special=False)
            values[n_tokens] |= {
                BUILD: build_ms,
                TOKENISE: cpu_milliseconds(tokenise),
                LOOK_UP: _lookup_milliseconds(n_tokens),
            }
    for n_tokens in sizes:
        with _tiny_backend(n_tokens) as backend:
            values[n_tokens] |= _rows_moved(backend, n_tokens)
    return curves_of(NAME, MEASURES, values)


def _build_milliseconds(chat: AgentChat, sizes: Sequence[int]) -> Iterator[float]:
    """Yield the time to build a prompt of each length, by a server that built the one before."""
    builder = chat.builder(MemoryTurns(Tombstones()))
    conversation = begun()
    first_builds: list[float] = []
    for n_tokens in sizes:
        while len(first_builds) < max(n_tokens // TOKENS_PER_TURN, N_BUILDS):
            began = time.thread_time()
            prompt = builder.from_conversation(conversation)
            first_builds.append(time.thread_time() - began)
            turn = len(first_builds)
            call, _ = chat.sampled(prompt, turn)
            conversation = answered(conversation, call, turn, TOKENS_PER_TURN)
        yield min(first_builds[-N_BUILDS:]) * 1e3


def _lookup_milliseconds(n_tokens: int) -> float:
    prompt = prompt_of(n_tokens + 1, seed=n_tokens)
    index = PrefixIndex(has_rows=True, has_checkpoints=False)
    for header in stored_blocks(prompt):
        index.add(header, Where.DISK)
    return cpu_milliseconds(partial(match_in, index, prompt))


@contextmanager
def _tiny_backend(n_tokens: int) -> Iterator[LlamaBackend]:
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_model(
            Path(folder) / "tiny.gguf", TinyArchitecture.LLAMA, context_length=2 * SIZES[-1]
        )
        params = context_params(n_cells=n_tokens + 2 * BLOCK_TOKENS, n_slots=1)
        with (
            closing(GgufModel(path, gpu_layers=0)) as model,
            closing(LlamaBackend(model, params)) as backend,
        ):
            backend.warm_up()
            yield backend


def _rows_moved(backend: LlamaBackend, n_tokens: int) -> dict[str, float]:
    """Measure a whole restore and a whole export. Only the first block is computed."""
    backend.clear_slot(0)
    places = list(range(BLOCK_TOKENS))
    backend.decode([300] * BLOCK_TOKENS, places, [0] * BLOCK_TOKENS, [BLOCK_TOKENS - 1])
    block = bytes(backend.export_rows(0, 0, BLOCK_TOKENS))
    starts = range(0, n_tokens, BLOCK_TOKENS)
    blocks = [_moved(block, start) for start in starts]

    def restore() -> None:
        backend.clear_slot(0)
        for start, rows in zip(starts, blocks, strict=True):
            backend.import_rows(0, start, start + BLOCK_TOKENS, rows)

    def export() -> None:
        for start in starts:
            backend.export_rows(0, start, start + BLOCK_TOKENS)

    restore_ms = cpu_milliseconds(restore)
    assert backend.n_positions(0) == n_tokens
    assert backend.export_rows(0, starts[-1], starts[-1] + BLOCK_TOKENS) == blocks[-1]
    return {RESTORE: restore_ms, EXPORT: cpu_milliseconds(export), ROWS: sum(map(len, blocks))}


def _moved(block: bytes, start: int) -> bytes:
    """Return the rows of the first block at other positions."""
    moved = np.frombuffer(block, np.uint8).copy()
    cells = moved[HEADER_BYTES : HEADER_BYTES + BLOCK_TOKENS * CELL_BYTES].view(np.int32)
    positions = cells[:: CELL_BYTES // cells.itemsize]
    assert (positions == np.arange(BLOCK_TOKENS)).all()  # else llama.cpp has another format
    positions += start
    return moved.tobytes()
