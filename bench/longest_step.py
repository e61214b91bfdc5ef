"""Measure the longest step of the engine beside a running stream, while something large happens.

    python -m bench.longest_step [--quick]

A step includes the orders that it receives. Two engines run on this thread, step by step. One
serves the embedded model, with a simulated store of 100,000 entries. The other has a stand-in for
a model with 200,000 tokens of context, which no machine prefills in a minute: a batch takes 10 ms,
the export or import of a block 2.5 ms, and samplers are llama.cpp's own.

`busy` is the time without other programs: the thread's CPU time and the stand-in's waits.
"""

import json
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from bench.engine_run import context_params, random_prompt
from bench.lookup import IndexOnlyTier
from bench.report import BenchRow, at_most, percentiles_ms, run_alone
from bench.simulated_store import headers
from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.disk.transfers import DiskTransfers, disk_pool
from rekindle.cache.entry import BLOCK_TOKENS
from rekindle.cache.policy import WriteRules
from rekindle.cache.prefix_cache import CachePolicy, PrefixCache
from rekindle.config.choices import WritePolicy
from rekindle.engine.backend import Backend, Embedder
from rekindle.engine.loop import EngineLoop
from rekindle.engine.orders import Ask, Cancel, Delivery, OpenCache, Wake
from rekindle.engine.scheduler.sampler_queue import PreparingThreads
from rekindle.errors import RekindleError
from rekindle.generation.events import Finished, TokenSampled
from rekindle.generation.forgetting import Scope, Tombstone
from rekindle.generation.model_state import ModelClass, Payload, StateTraits
from rekindle.generation.questions import Forget, ListBranches, ListStored, LookUp, Question
from rekindle.generation.request import GenerationRequest, Grammar, GrammarKind, Sampling
from rekindle.link.activity_page import ActivityPage, new_page_file
from rekindle.llama.context import LlamaBackend
from rekindle.llama.model import GgufModel
from rekindle.models.source import resolve_model

T = TypeVar("T")

NAME = "longest_step"
LIMIT_MS = 50.0
ROOT = b"m" * 16
N_QUIET_STEPS = 100
MAX_STEPS = 20_000
DECODE_SECONDS = 0.010
EXPORT_SECONDS = 0.0025  # of a block: 1.96 s for the 782 blocks of 200,000 tokens
MEMORY_BYTES = 2**30
GREEDY = Sampling(temperature=0, ignore_eos=True)


def main(*, quick: bool = False) -> list[BenchRow]:
    n_entries, n_tools, n_tokens = (1_000, 10, 4_000) if quick else (100_000, 1_000, 200_000)
    model = GgufModel(resolve_model(None).path, gpu_layers=-1)
    try:
        rows = _measure_store(model, n_entries, n_tools)
        rows += _measure_long_prompts(model, n_tokens)
    finally:
        model.close()
    return rows


def _measure_store(model: GgufModel, n_entries: int, n_tools: int) -> list[BenchRow]:
    backend = LlamaBackend(model, context_params(n_cells=8192, n_slots=2))
    backend.check_grammar(Grammar(GrammarKind.REGEX, "."))  # a server has done this
    engine = _SteppedEngine(backend, _store_opener(n_entries), n_entries=n_entries)
    engine.stream()
    rows = engine.measure("nothing else", engine.n_steps_later(N_QUIET_STEPS))
    tools = Sampling(temperature=0, grammar=_grammar_of(n_tools))
    rows += engine.measure_request(f"{n_tools:,} new tools", (1, 2, 3), tools)
    asks = {
        "listed": ListStored(namespace="", limit=1000),
        "as a forest": ListBranches(namespace="", limit=10_000),
        "deleted": Forget(tombstone=Tombstone(scope=Scope(namespace=""), at=time.time())),
    }
    for name, question in asks.items():
        is_answered = engine.ask(cast(Question[object], question))
        rows += engine.measure(f"{n_entries:,} entries {name}", is_answered)
    rows += engine.measure("after the delete", engine.n_steps_later(N_QUIET_STEPS))
    engine.close()
    return rows


def _measure_long_prompts(model: GgufModel, n_tokens: int) -> list[BenchRow]:
    sampling = LlamaBackend(model, context_params(n_cells=512, n_slots=1))
    sampling.n_ctx = 2 * n_tokens
    n_cells = n_tokens + n_tokens // 2
    backend = _StandIn(sampling, n_cells)
    engine = _SteppedEngine(cast(Backend, backend), _memory_opener())
    engine.stream()
    first, second = (random_prompt(seed, n_tokens) for seed in (1, 2))
    size = f"{n_tokens:,} tokens"
    rows = engine.measure_request(f"{size} arrive and are prefilled", first)
    rows += engine.measure(f"{size}: the turn ends", engine.n_steps_later(N_QUIET_STEPS))
    is_evaluated = engine.submit("second", second, GREEDY, max_tokens=n_tokens // 4)
    rows += engine.measure(f"{size} take the cells of {size}", is_evaluated)
    is_restored = engine.submit("third", first, GREEDY)
    rows += engine.measure(f"{size} wait for cells", engine.n_steps_later(N_QUIET_STEPS))
    engine.cancel("second")
    rows += engine.measure(f"{size} return from memory", is_restored)
    is_answered = engine.ask(LookUp(tokens=second, namespace=""))
    rows += engine.measure(f"{size} are looked up", is_answered)
    penalties = Sampling(seed=1, repeat_penalty=1.1, repeat_last_n=-1)
    rows += engine.measure_request(f"{size}, repeat_last_n=-1", first, penalties)
    engine.cancel("stream")
    # Other tokens at the start: nothing of it is stored.
    engine.submit("alone", (7, *second), GREEDY)
    rows += engine.measure(f"{size}: prefill and end, nobody streams", engine.is_at_rest("alone"))
    engine.close()
    sampling.close()
    return rows


class _SteppedEngine:
    """An engine loop on this thread, and the seconds of each step."""

    def __init__(self, backend: Backend, open_cache: OpenCache, *, n_entries: int = 0) -> None:
        self._backend = backend
        self._seconds: list[float] = []
        self._busy_seconds: list[float] = []
        self._begun: set[str] = set()
        self._ended: set[str] = set()
        embedder = cast(Embedder, SimpleNamespace(rest=lambda: None))  # never asked to compute
        self._loop = EngineLoop(
            backend,
            self._note,
            open_cache,
            queue_size=8,
            embedder=embedder,
            preparer=PreparingThreads(),
            activity=ActivityPage(new_page_file()),
        )
        self._loop.start()
        while self._loop._cache.status().tiers[-1].n_entries < n_entries:
            self._loop._cache.poll()

    def stream(self) -> None:
        is_running = self.submit("stream", (1, 2, 3), GREEDY, max_tokens=None)
        while not is_running():
            self._step()

    def submit(
        self, name: str, prompt: Sequence[int], sampling: Sampling, max_tokens: int | None = 1
    ) -> Callable[[], bool]:
        """Return a function that tells whether the first token has come, or the request failed."""
        request = GenerationRequest(
            id=name,
            prompt=tuple(prompt),
            boundaries=(),
            sampling=sampling,
            max_tokens=max_tokens,
        )
        self._loop.inbox.put(request)
        return lambda: name in self._begun or name in self._ended

    def cancel(self, name: str) -> None:
        self._loop.inbox.put(Cancel(name))

    def ask(self, question: Question[T]) -> Callable[[], bool]:
        order = Ask(question)
        self._loop.inbox.put(order)
        return order.outcome.done

    def is_at_rest(self, name: str) -> Callable[[], bool]:
        """Return a function that tells whether the request, the last one, is over and stored."""
        return lambda: name in self._ended and self._loop._is_stalled

    def n_steps_later(self, n_steps: int) -> Callable[[], bool]:
        n_last = len(self._seconds) + n_steps
        return lambda: len(self._seconds) >= n_last

    def measure_request(
        self, case: str, prompt: Sequence[int], sampling: Sampling = GREEDY
    ) -> list[BenchRow]:
        return self.measure(case, self.submit(case, prompt, sampling))

    def measure(self, case: str, is_over: Callable[[], bool]) -> list[BenchRow]:
        n_before = len(self._seconds)
        while not is_over():
            self._step()
            assert len(self._seconds) < n_before + MAX_STEPS, case
        seconds = self._seconds[n_before:]
        busy_seconds = self._busy_seconds[n_before:]
        _, p99 = percentiles_ms(seconds)
        return [
            BenchRow(NAME, case, "longest_ms", max(seconds) * 1e3, at_most(LIMIT_MS)),
            BenchRow(NAME, case, "p99_ms", p99),
            BenchRow(NAME, case, "longest_busy_ms", max(busy_seconds) * 1e3, at_most(LIMIT_MS)),
            BenchRow(NAME, case, "steps", len(seconds)),
        ]

    def close(self) -> None:
        self._loop.stop()

    def _step(self) -> None:
        self._loop.inbox.put(Wake())  # an idle loop would wait for an order
        began, busy_before = time.perf_counter(), self._busy()
        self._loop.receive()
        self._loop.step()
        self._loop.outbox.flush()
        self._seconds.append(time.perf_counter() - began)
        self._busy_seconds.append(self._busy() - busy_before)

    def _busy(self) -> float:
        waited = self._backend.waited_seconds if isinstance(self._backend, _StandIn) else 0.0
        return time.thread_time() + waited

    def _note(self, deliveries: list[Delivery]) -> None:
        for name, event in deliveries:
            if isinstance(event, RekindleError):
                raise event
            if isinstance(event, TokenSampled):
                self._begun.add(name)
            elif isinstance(event, Finished):
                self._ended.add(name)


class _StandIn:
    """A dense model without weights. Rows of a block are 64 KiB, but take as long as 6 MB."""

    n_slots = 3
    n_ubatch = 512
    n_draft_rows = 0
    pays_for_holes = False
    has_room_to_move = False
    on_gpu = False
    eog_tokens: frozenset[int] = frozenset()
    logits_bytes = 4
    traits = StateTraits(
        ModelClass.DENSE, has_rows=True, has_checkpoints=False, off_because=None, row_bytes=256
    )

    def __init__(self, sampling: LlamaBackend, n_cells: int) -> None:
        self.n_cells = self.n_ctx = n_cells
        self.waited_seconds = 0.0
        self.check_grammar = sampling.check_grammar
        self.new_sampler = sampling.new_sampler

    def decode(self, *_batch: Sequence[int]) -> None:
        self._wait(DECODE_SECONDS)

    def wait(self) -> None:
        pass

    def sample(self, _samplers: Sequence[Any], rows: Sequence[int]) -> list[TokenSampled]:
        return [TokenSampled(1) for _ in rows]

    def logits(self, _row: int) -> Payload:
        return bytes(self.logits_bytes)

    def sample_stored(self, _sampler: object, _logits: Payload) -> TokenSampled:
        return TokenSampled(1)

    def export_rows(self, slot: int, start: int, stop: int) -> Payload:
        self._wait(EXPORT_SECONDS * (stop - start) / BLOCK_TOKENS)
        return bytes(self.traits.row_bytes * (stop - start))

    def import_rows(self, slot: int, start: int, stop: int, rows: Payload) -> None:
        self._wait(EXPORT_SECONDS * (stop - start) / BLOCK_TOKENS)

    def can_trim(self, slot: int, n_keep: int) -> bool:
        return True

    def _wait(self, seconds: float) -> None:
        self.waited_seconds += seconds
        time.sleep(seconds)

    def _do_nothing(self, *_arguments: int) -> None:
        pass

    clear_slot = clear_all = trim_slot = copy_slot = expect_exports = warm_up = close = _do_nothing


def _store_opener(n_entries: int) -> OpenCache:
    def open_cache(traits: StateTraits, notify: Callable[[], None]) -> PrefixCache:
        tier = IndexOnlyTier([*headers(n_entries, root=ROOT, payload_bytes=6_000_000)])
        transfers = DiskTransfers(cast(DiskTier, tier), disk_pool(notify))
        return PrefixCache(ROOT, traits, _policy(disk_bytes=2**50), transfers, None)

    return open_cache


def _memory_opener() -> OpenCache:
    return lambda traits, _: PrefixCache(ROOT, traits, _policy(disk_bytes=0), None, None)


def _policy(*, disk_bytes: int) -> CachePolicy:
    rules = WriteRules(bytes_per_hour=0, policy=WritePolicy.REUSED, min_tokens=0)
    return CachePolicy(
        memory_bytes=MEMORY_BYTES, disk_bytes=disk_bytes, writes=rules, may_recompute=False
    )


def _grammar_of(n_tools: int) -> Grammar:
    """Return the calls of tools, each with its own name and fields."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": f"tool_{number}"},
                "arguments": {
                    "type": "object",
                    "properties": {
                        f"text_{number}": {"type": "string"},
                        f"count_{number}": {"type": "integer"},
                        "mode": {"enum": ["fast", "slow"]},
                    },
                    "required": ["mode"],
                    "additionalProperties": False,
                },
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number in range(n_tools)
    ]
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"anyOf": calls}))


if __name__ == "__main__":
    run_alone(main)
