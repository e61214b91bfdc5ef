"""Measure conversations that all return at once after a restart.

    python -m bench.mass_return [CONVERSATIONS [DISK_MB_PER_SECOND [PREFILL_TOKENS_PER_SECOND]]]

Engine loop, cache and disk tier are the server's own. The model is simulated: a decode takes the
time of its tokens. Reads share the bandwidth of a simulated disk. So the result does not depend on
the machine.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.engine_run import random_prompt, scratch_directory
from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.disk.transfers import DiskTransfers, disk_pool
from rekindle.cache.entry import Entry, Key
from rekindle.cache.policy import WriteRules
from rekindle.cache.prefix_cache import CachePolicy, PrefixCache
from rekindle.config.choices import WritePolicy
from rekindle.config.declare import GIB
from rekindle.engine.loop import EngineLoop
from rekindle.engine.orders import Delivery, Stop
from rekindle.engine.scheduler.sampler_queue import PreparingThreads
from rekindle.generation.events import Finished, PromptEvaluated, TokenSampled
from rekindle.generation.model_state import Payload, StateTraits
from rekindle.generation.request import GenerationRequest, Sampling
from rekindle.link.activity_page import ActivityPage, new_page_file
from tests.support.fake_backend import FakeBackend
from tests.support.fake_embedder import FakeEmbedder

ROOT = b"r" * 16
PROMPT_TOKENS = 2048
NEW_TOKENS = 16  # of the turn that returns
REPLY_TOKENS = 8
ROW_BYTES = 4096
MEGABYTE = 1_000_000
N_SLOTS = (8, 32)
_SIZE_BYTES = 8


class SimulatedBackend(FakeBackend):
    """A model whose decode takes time for each token, with rows of a usual size."""

    def __init__(self, n_slots: int, tokens_per_second: float) -> None:
        super().__init__(n_slots=n_slots, n_cells=n_slots * (PROMPT_TOKENS + 512))
        self._tokens_per_second = tokens_per_second

    def decode(
        self, tokens: list[int], positions: list[int], slots: list[int], outputs: list[int]
    ) -> None:
        time.sleep(len(tokens) / self._tokens_per_second)
        super().decode(tokens, positions, slots, outputs)

    def _pack(self, kind: bytes, tokens: list[int], start: int, stop: int) -> memoryview:
        packed = super()._pack(kind, tokens, start, stop)
        size = len(packed).to_bytes(_SIZE_BYTES, "little")
        return memoryview(size + packed + bytes((stop - start) * ROW_BYTES))

    def _unpack(self, kind: bytes, payload: Payload) -> tuple[int, bytes, list[int]]:
        size = int.from_bytes(payload[:_SIZE_BYTES], "little")
        return super()._unpack(kind, payload[_SIZE_BYTES : _SIZE_BYTES + size])


class SimulatedDiskTier(DiskTier):
    """A disk tier whose reads share one bandwidth."""

    bytes_per_second = float("inf")

    def __init__(self, directory: Path, is_leased: Callable[[Key], bool]) -> None:
        super().__init__(directory, fingerprint=ROOT, budget_bytes=64 * GIB, is_leased=is_leased)
        self._disk = threading.Lock()

    def get(self, key: Key) -> Entry:
        entry = super().get(key)
        with self._disk:
            time.sleep(entry.header.payload_bytes / self.bytes_per_second)
        return entry


class Server:
    """An engine on its own thread, and when each request's events came."""

    def __init__(self, directory: Path, n_slots: int, tokens_per_second: float) -> None:
        self.first_token_at: dict[str, float] = {}
        self.evaluated: dict[str, PromptEvaluated] = {}
        self.backend = SimulatedBackend(n_slots, tokens_per_second)
        self._directory = directory
        self._finished = threading.Semaphore(0)
        self._loop = EngineLoop(
            self.backend,
            self._deliver,
            self._open_cache,
            queue_size=0,
            embedder=FakeEmbedder(),
            preparer=PreparingThreads(),
            activity=ActivityPage(new_page_file()),
        )
        self._thread = threading.Thread(target=self._loop.run)
        self._thread.start()

    def ask_all(self, prompts: Sequence[tuple[int, ...]], n_tokens: int) -> None:
        for number, prompt in enumerate(prompts):
            request = GenerationRequest(
                id=str(number),
                prompt=prompt,
                boundaries=(),
                sampling=Sampling(temperature=0),
                max_tokens=n_tokens,
            )
            self._loop.inbox.put(request)
        for _ in prompts:
            self._finished.acquire()

    def close(self) -> None:
        self._loop.inbox.put(Stop())
        self._thread.join()

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for name, event in deliveries:
            match event:
                case PromptEvaluated():
                    self.evaluated[name] = event
                case TokenSampled():
                    self.first_token_at.setdefault(name, time.perf_counter())
                case Finished() | Exception():
                    self._finished.release()

    def _open_cache(self, traits: StateTraits, notify: Callable[[], None]) -> PrefixCache:
        policy = CachePolicy(
            memory_bytes=GIB,
            disk_bytes=64 * GIB,
            writes=WriteRules(bytes_per_hour=0, policy=WritePolicy.ALL, min_tokens=0),
            may_recompute=True,
        )
        tier = SimulatedDiskTier(self._directory, is_leased=lambda key: cache.is_leased(key))
        cache = PrefixCache(ROOT, traits, policy, DiskTransfers(tier, disk_pool(notify)), None)
        return cache


class GiveUps(logging.Handler):
    """Counts restores that the engine gave up."""

    n_seen = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.n_seen += "too slow" in record.getMessage()


def main(
    n_conversations: int = 32, disk_mb_per_second: float = 12, tokens_per_second: float = 1000
) -> None:
    give_ups = GiveUps()
    logging.getLogger("rekindle.engine").addHandler(give_ups)
    histories = [random_prompt(seed, PROMPT_TOKENS) for seed in range(n_conversations)]
    table = Table(
        "slots", "whole", "in part", "given up", "prefilled again", "median, s", "last, s"
    )
    with scratch_directory() as directory:
        storing = Server(directory, n_slots=8, tokens_per_second=float("inf"))
        storing.ask_all(histories, n_tokens=1)
        storing.close()
        SimulatedDiskTier.bytes_per_second = disk_mb_per_second * MEGABYTE
        for n_slots in N_SLOTS:
            give_ups.n_seen = 0
            table.add_row(
                str(n_slots), *_return(directory, histories, n_slots, tokens_per_second, give_ups)
            )
    title = f"{n_conversations} conversations of {PROMPT_TOKENS} tokens return at once"
    Console().print(title, table)


def _return(
    directory: Path,
    histories: Sequence[tuple[int, ...]],
    n_slots: int,
    tokens_per_second: float,
    give_ups: GiveUps,
) -> list[str]:
    server = Server(directory, n_slots, tokens_per_second)
    began = time.perf_counter()
    prompts = [
        (*history, *random_prompt(1000 * n_slots + number, NEW_TOKENS))
        for number, history in enumerate(histories)
    ]
    server.ask_all(prompts, REPLY_TOKENS)
    server.close()
    again = [max(PROMPT_TOKENS - each.n_cached, 0) for each in server.evaluated.values()]
    seconds = [at - began for at in server.first_token_at.values()]
    return [
        str(sum(n == 0 for n in again)),
        str(sum(0 < n < PROMPT_TOKENS for n in again)),
        str(give_ups.n_seen),
        str(sum(again)),
        f"{median(seconds):.1f}",
        f"{max(seconds):.1f}",
    ]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
