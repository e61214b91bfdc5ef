"""Slots: a decode step apart from the model, and the memory of a context.

The engine of the step has a stub in place of llama.cpp and decodes one token for every slot. The
context is that of a tiny model, with equal room for each slot.
"""

import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

from bench.curves.curve import BYTES, LINEAR, MILLISECONDS, Curve, Measured, curves_of
from bench.engine_run import context_params
from bench.step_cost import StepPlan, measure_stub
from rekindle.llama.context import LlamaBackend
from rekindle.llama.model import GgufModel
from tests.support.tables import anonymous_bytes
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

NAME = "slots"
ABOUT = "slots that decode together"
SIZES = (1, 2, 4, 8, 16, 32, 64)
QUICK_SIZES = (1, 4)
N_STEPS = 64  # the first ones have fewer sequences than slots
CELLS_PER_SLOT = 4096
STEP, MEMORY = "a step without the model", "context of a tiny model"
MEASURES = (Measured(STEP, MILLISECONDS, LINEAR), Measured(MEMORY, BYTES, LINEAR))


def measure(sizes: Sequence[int]) -> list[Curve]:
    steps_us = measure_stub(StepPlan(n_sequences=tuple(sizes), n_steps=N_STEPS))
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny.gguf", TinyArchitecture.LLAMA)
        values = {
            n_slots: {STEP: steps_us[n_slots] / 1e3, MEMORY: _context_bytes(model, n_slots)}
            for n_slots in sizes
        }
    return curves_of(NAME, MEASURES, values)


def _context_bytes(path: Path, n_slots: int) -> float:
    """Measure in a new process: memory that was freed before would be used again."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(context_growth, path, n_slots).result()


def context_growth(path: Path, n_slots: int) -> int:
    """Return by how much the process grows for a context with these slots."""
    with closing(GgufModel(path, gpu_layers=0)) as model:
        before = anonymous_bytes()
        params = context_params(n_cells=n_slots * CELLS_PER_SLOT, n_slots=n_slots)
        with closing(LlamaBackend(model, params)) as backend:
            backend.warm_up()
            return anonymous_bytes() - before
