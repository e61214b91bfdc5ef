"""Steps of tests with a backend: fill slots, continue them, save and restore them."""

from dataclasses import dataclass

from rekindle.engine.backend import Backend
from rekindle.generation.events import TokenSampled
from rekindle.generation.model_state import Payload
from rekindle.generation.request import Sampling
from rekindle.llama.context import ContextParams, LlamaBackend
from rekindle.llama.model import GgufModel

BLOCK = 128
NEAR_TIE = 0.05  # of log probabilities; picked


def make_backend(
    model: GgufModel, *, n_cells: int = 2048, n_slots: int = 4, swa_full: bool = False
) -> LlamaBackend:
    backend = LlamaBackend(
        model,
        ContextParams(
            n_cells=n_cells,
            n_slots=n_slots,
            n_batch=512,
            n_ubatch=256,
            n_threads=1,
            flash_attn="auto",
            type_k="f16",
            type_v="f16",
            swa_full=swa_full,
        ),
    )
    backend.warm_up()
    return backend


def prompt(n_tokens: int, seed: int = 1) -> list[int]:
    return [3 + (seed * 7919 + index * 104729) % 500 for index in range(n_tokens)]


def prefill(backend: Backend, slot: int, tokens: list[int], start: int = 0) -> None:
    for begin in range(start, len(tokens), 64):
        chunk = tokens[begin : begin + 64]
        positions = list(range(begin, begin + len(chunk)))
        backend.decode(chunk, positions, [slot] * len(chunk), [len(chunk) - 1])


def continue_greedily(
    backend: Backend, slot: int, tokens: list[int], n_tokens: int = 12
) -> list[int]:
    """`tokens` is all the slot holds but the last, which is decoded first."""
    [reply] = continue_together(backend, [slot], tokens, n_tokens)
    return reply


def continue_together(
    backend: Backend, slots: list[int], tokens: list[int], n_tokens: int = 12
) -> list[list[int]]:
    """The same for slots that hold the same, in one batch per step.

    Rows of one batch are rounded differently: where two tokens are nearly equal, all slots go on
    with the first one's.
    """
    samplers = [backend.new_sampler(Sampling(temperature=0), (), 0, 2) for _ in slots]
    reply: list[int] = []
    last, position = tokens[-1], len(tokens) - 1
    rows = list(range(len(slots)))
    for _ in range(n_tokens):
        backend.decode([last] * len(slots), [position] * len(slots), list(slots), list(rows))
        sampled = backend.sample(samplers, rows)
        assert isinstance(sampled[0], TokenSampled)
        last = sampled[0].token
        for each in sampled:
            assert isinstance(each, TokenSampled)
            assert each.token == last or is_near_tie(each, last), (sampled, reply)
        reply.append(last)
        position += 1
    for sampler in samplers:
        sampler.close()
    return [reply] * len(slots)


def is_near_tie(sampled: TokenSampled, other: int) -> bool:
    assert sampled.logprobs is not None
    scores = dict(sampled.logprobs.top)
    return other in scores and scores[sampled.token] - scores[other] < NEAR_TIE


@dataclass(frozen=True)
class Saved:
    blocks: list[Payload]
    checkpoint: Payload | None

    def as_bytes(self) -> "Saved":
        checkpoint = None if self.checkpoint is None else bytes(self.checkpoint)
        return Saved([bytes(rows) for rows in self.blocks], checkpoint)


def save(backend: Backend, slot: int, n_tokens: int) -> Saved:
    """Return a slot's blocks of rows and its checkpoint, if the model has them."""
    blocks: list[Payload] = []
    if backend.traits.has_rows:
        for start in range(0, n_tokens, BLOCK):
            blocks.append(backend.export_rows(slot, start, min(start + BLOCK, n_tokens)))
    has_checkpoint = backend.traits.has_checkpoints
    return Saved(blocks, backend.export_checkpoint(slot) if has_checkpoint else None)


def restore(backend: Backend, slot: int, n_tokens: int, saved: Saved, *, n_live: int = 0) -> None:
    for index, rows in enumerate(saved.blocks):
        start, stop = max(BLOCK * index, n_live), min(BLOCK * (index + 1), n_tokens)
        if start < stop:
            backend.import_rows(slot, start, stop, rows)
    if saved.checkpoint is not None:
        backend.import_checkpoint(slot, saved.checkpoint)
