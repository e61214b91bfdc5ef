"""Measure a lookup against the number of stored entries, and the memory of an entry.

    python -m bench.lookup [--quick]

All work that the cache adds to a request, apart from moving rows. Tokens are encoded and matched.
The engine compares them with eight live slots, decides, and notes the use. `chat` compares the
prompt with earlier ones. The prompt is stored completely.
"""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from bench.engine_run import random_prompt, timed
from bench.report import BenchRow, at_most, percentiles_ms, run_alone
from bench.simulated_store import N_VOCAB, chain, headers
from rekindle.cache.disk.catalogue import CatalogRow
from rekindle.cache.disk.deletion import RowsForgotten
from rekindle.cache.disk.reconcile import Differences
from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.disk.transfers import DiskTransfers, disk_pool
from rekindle.cache.entry import Entry, Header, Key, Retention, token_bytes
from rekindle.cache.forgetting.deletions import Deletions
from rekindle.cache.index import PrefixIndex, Where
from rekindle.cache.keys import PrefixKeys
from rekindle.cache.names import Named
from rekindle.cache.policy import WriteRules
from rekindle.cache.prefix_cache import CachePolicy, PrefixCache
from rekindle.chat.accounts.accounts import Accounts
from rekindle.chat.accounts.recent_prompts import past_prompt
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.events import ReplyOptions
from rekindle.chat.reply.parser import ParsedReply
from rekindle.config.choices import WritePolicy
from rekindle.engine.backend import Backend
from rekindle.engine.export.slot_saver import SlotSaver
from rekindle.engine.reuse.prefix_finder import PrefixFinder
from rekindle.engine.sequence import Sequence as Running
from rekindle.engine.slots import Slots
from rekindle.engine.step_time import StepTime
from rekindle.errors import EntryMissing
from rekindle.generation.events import PromptEvaluated
from rekindle.generation.forgetting import Tombstone, Tombstones
from rekindle.generation.model_state import ModelClass, StateTraits
from rekindle.generation.request import USUAL_TERMS, GenerationRequest, Sampling

NAME = "lookup"
MODEL = b"m" * 16
SIZES = (1_000, 10_000, 100_000, 1_000_000)
PROMPTS = (1_024, 8_192, 32_768)
PAYLOAD_BYTES = 6_000_000
N_SLOTS = 8
N_ASKED_BEFORE = 100
N_REPEATS = 200
LIMIT_MS = 2.0
TRAITS = StateTraits(ModelClass.DENSE, has_rows=True, has_checkpoints=False, off_because=None)


def main(*, quick: bool = False) -> list[BenchRow]:
    sizes = SIZES[:1] if quick else SIZES
    n_repeats = 10 if quick else N_REPEATS
    rows: list[BenchRow] = []
    for n_entries in sizes:
        rows += _measure_store(n_entries, n_repeats)
    return rows + _measure_accounts(n_repeats)


def _measure_store(n_entries: int, n_repeats: int) -> list[BenchRow]:
    prompts = {n_tokens: prompt_of(n_tokens, seed=n_tokens) for n_tokens in PROMPTS}
    index = PrefixIndex(has_rows=True, has_checkpoints=False)
    before = _resident_bytes()
    for header in headers(n_entries, root=MODEL, payload_bytes=PAYLOAD_BYTES):
        index.add(header, Where.DISK)
    entry_bytes = (_resident_bytes() - before) / n_entries
    rows = [BenchRow(NAME, f"{n_entries:,} entries", "bytes_per_entry", entry_bytes)]
    stored = [header for prompt in prompts.values() for header in stored_blocks(prompt)]
    for header in stored:
        index.add(header, Where.DISK)
    gc.freeze()  # as the server does once its index is read
    for n_tokens, prompt in prompts.items():
        case = f"{n_entries:,} entries, {n_tokens:,} tokens"
        seconds = _repeat(n_repeats, partial(match_in, index, prompt))
        rows += _rows(case, "match", seconds)
    index = None  # type: ignore[assignment]
    gc.unfreeze()
    return rows + _measure_engine(n_entries, stored, prompts, n_repeats)


def match_in(index: PrefixIndex, prompt: tuple[int, ...]) -> None:
    keys = PrefixKeys(MODEL, list(prompt))
    match = index.match(MODEL, keys.between(0, len(prompt) - 1))
    assert match.n_tokens == len(prompt) - 1


def _measure_engine(
    n_entries: int, stored: list[Header], prompts: dict[int, tuple[int, ...]], n_repeats: int
) -> list[BenchRow]:
    """Measure the engine's part, with a disk tier that answers at once and has no rows."""
    tier = IndexOnlyTier([*headers(n_entries, root=MODEL, payload_bytes=PAYLOAD_BYTES), *stored])
    rules = WriteRules(bytes_per_hour=0, policy=WritePolicy.REUSED, min_tokens=0)
    policy = CachePolicy(memory_bytes=0, disk_bytes=2**40, writes=rules, may_recompute=False)
    cache = PrefixCache(
        MODEL, TRAITS, policy, DiskTransfers(cast(DiskTier, tier), disk_pool(lambda: None)), None
    )
    cache.start()
    while cache.status().tiers[-1].n_entries < n_entries + len(stored):
        cache.poll()
    gc.freeze()  # as the server does once its index is read
    rows: list[BenchRow] = []
    for n_tokens, prompt in prompts.items():
        engine = EngineLookup(cache, prompt)
        found = _repeat(n_repeats, engine.find)
        used = _repeat(n_repeats, engine.use)
        case = f"{n_entries:,} entries, {n_tokens:,} tokens"
        rows += _rows(case, "find", found)
        rows += _rows(case, "note_use", used)
    cache.close(0.0)
    gc.unfreeze()
    return rows


class EngineLookup:
    """The part of the engine that looks up a prompt. Every slot holds half of it."""

    def __init__(self, cache: PrefixCache, prompt: tuple[int, ...]) -> None:
        self._cache = cache
        self._request = GenerationRequest(
            id="lookup", prompt=prompt, boundaries=(), sampling=Sampling(), max_tokens=1
        )
        slots = Slots(N_SLOTS, n_cells=2**20)
        backend = cast(Backend, _NoBackend())
        self._finder = PrefixFinder(
            backend, slots, cache, SlotSaver(backend, slots, cache, StepTime())
        )
        for slot in slots.all:
            other = [*prompt[: len(prompt) // 2], *prompt_of(len(prompt) // 2, seed=slot.id)]
            slot.keys, slot.n_kept_rows = cache.keys(other, ""), len(other)

    def find(self) -> None:
        tokens = list(self._request.prompt)
        sequence = Running(
            request=self._request,
            arrived_at=0.0,
            max_length=len(tokens) + 1,
            tokens=tokens,
            keys=self._cache.keys(tokens, ""),
        )
        start = self._finder.find(sequence)
        assert start.match is not None
        assert start.n_tokens == len(tokens) - 1
        self._match = start.match

    def use(self) -> None:
        self._cache.use(self._match, USUAL_TERMS)


class _NoBackend:
    traits = TRAITS


def _measure_accounts(n_repeats: int) -> list[BenchRow]:
    """Measure how `chat` finds the reason of a miss. The store does not matter."""
    rows: list[BenchRow] = []
    for n_tokens in PROMPTS:
        accounts = Accounts(Tombstones())
        for seed in range(N_ASKED_BEFORE):
            account_for(accounts, prompt_of(n_tokens, seed=seed), n_cached=0)
        prompt = prompt_of(n_tokens, seed=0)[:-64] + prompt_of(64, seed=1)

        def ask(accounts: Accounts = accounts, prompt: tuple[int, ...] = prompt) -> None:
            account_for(accounts, prompt, n_cached=len(prompt) // 2)

        case = f"accounts, {n_tokens:,} tokens"
        rows += _rows(case, "account", _repeat(n_repeats, ask))
    return rows


def account_for(accounts: Accounts, prompt: tuple[int, ...], n_cached: int) -> None:
    options = ReplyOptions(sampling=Sampling())
    asked = past_prompt(Prompt(prompt, (), ""), USUAL_TERMS, model="model")
    account = accounts.open(asked, options, lambda _tokens: "", can_store=True, n_ctx=1 << 20)
    account.settle(
        PromptEvaluated(
            n_prompt=len(prompt), n_cached=n_cached, queue_seconds=0.0, prefill_seconds=0.0
        )
    )
    account.close(len(prompt), [], ParsedReply("", "", ()), [])


class IndexOnlyTier:
    """A disk tier that lists entries without rows."""

    directory = Path("nowhere")
    n_opens = 1
    n_bytes = 0

    def __init__(self, listed: Sequence[Header]) -> None:
        self._listed = listed
        self.deletions = Deletions(MODEL)

    def forget(self, tombstone: Tombstone) -> RowsForgotten:
        return RowsForgotten()

    def open_as_it_is(self) -> None:
        pass

    def reconcile(self, *, on_progress: Callable[[int, int], None] | None = None) -> Differences:
        return Differences([], 0)

    def rows(self) -> Iterator[list[CatalogRow]]:
        for first in range(0, len(self._listed), 1000):
            batch = self._listed[first : first + 1000]
            yield [CatalogRow(header, header.created_at, hits=1) for header in batch]
        self._listed = ()

    def along(self, path: Sequence[Key]) -> list[CatalogRow]:
        return []

    def get(self, key: Key) -> Entry:
        raise EntryMissing(key.hex())

    def put(self, entry: Entry) -> list[Key]:
        return []

    def drop(self, keys: Sequence[Key]) -> None:
        pass

    def touch(self, keys: Sequence[Key]) -> list[Key]:
        return []

    def mark(self, key: Key, retention: Retention) -> None:
        pass

    def names(self) -> list[Named]:
        return []

    def give_name(self, named: Named) -> None:
        pass

    def drop_names(self, names: Sequence[Named]) -> None:
        pass

    def quarantine(self, key: Key, why: str) -> None:
        pass

    def close(self) -> None:
        pass


def stored_blocks(prompt: tuple[int, ...]) -> list[Header]:
    return chain(MODEL, token_bytes(prompt), payload_bytes=PAYLOAD_BYTES)


def prompt_of(n_tokens: int, *, seed: int) -> tuple[int, ...]:
    return random_prompt(seed, n_tokens, range(N_VOCAB))


def _repeat(n_repeats: int, action: Callable[[], None]) -> list[float]:
    return [timed(action)[1] for _ in range(n_repeats)]


def _rows(case: str, name: str, seconds: Sequence[float]) -> list[BenchRow]:
    p50, p99 = percentiles_ms(seconds)
    limit = at_most(LIMIT_MS) if name in ("match", "find") else None
    return [
        BenchRow(NAME, case, f"{name}_p50_ms", p50, limit),
        BenchRow(NAME, case, f"{name}_p99_ms", p99),
    ]


def _resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    run_alone(main)
