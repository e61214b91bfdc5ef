"""Many conversations return at once: their reads take turns, and none gives up while reads move."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.entry import BLOCK_TOKENS, Entry, Key
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.orders import Cancel
from rekindle.engine.reuse.restorer import PATIENCE_SECONDS
from rekindle.generation.events import PromptEvaluated
from tests.support.caches import cache_opener
from tests.support.fake_backend import FakeBackend, expected_reply
from tests.support.loop_driver import Bench
from tests.support.stepped_transfers import AT_ONCE, Clock, Pace, SteppedPool

N_BLOCKS = 12
N_TOKENS = N_BLOCKS * BLOCK_TOKENS
ONE_READ = Pace(n_reads=1, n_writes=0)


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock.installed():
        yield clock


class Returning:
    """A restarted engine whose reads the test does one by one."""

    def __init__(self, directory: Path, clock: Clock, n_conversations: int, **cache: bool) -> None:
        self.clock = clock
        self.prompts = [
            list(range(n * 100_000, n * 100_000 + N_TOKENS)) for n in range(1, n_conversations + 1)
        ]
        self._directory = directory
        before = self._start(may_recompute=False)
        for number, prompt in enumerate(self.prompts):
            before.ask(f"{number}", prompt, 1)
        before.close()
        self.bench = self._start(**cache)
        self._pool.work(AT_ONCE)  # opens the catalogue
        self.bench.step()

    def _start(self, *, may_recompute: bool = False) -> Bench:
        opened: list[PrefixCache] = []
        opener = cache_opener(
            self._directory,
            may_recompute=may_recompute,
            opened=opened,
            make_pool=self._make_pool,
        )
        backend = FakeBackend(n_slots=len(self.prompts), n_cells=len(self.prompts) * 2 * N_TOKENS)
        bench = Bench(backend, opener)
        [self.cache] = opened
        return bench

    def _make_pool(self, notify: object) -> SteppedPool:
        self._pool = SteppedPool(notify)  # type: ignore[arg-type]
        return self._pool

    def submit(self, number: int) -> None:
        self.bench.submit(f"{number}", [*self.prompts[number], 7], 1)

    def submit_all(self) -> None:
        for number in range(len(self.prompts)):
            self.submit(number)
        self.bench.step()

    def read(self, n_entries: int, *, seconds: float = 0.001) -> None:
        """Read entries one after another, with a step of the engine after each."""
        for _ in range(n_entries):
            self.clock.now += seconds
            self._pool.work(ONE_READ)
            self.bench.step()

    def measure(self, *, load_share: float) -> None:
        """Let a conversation load in this share of the time that it takes to compute it."""
        saver, gate = self.bench.loop._saver, self.cache.gate
        if saver.prefill_seconds_per_token is None:
            self.bench.ask("another", list(range(9_000_000, 9_000_600)), 1)
        assert saver.prefill_seconds_per_token is not None
        keys = self.cache.keys(self.prompts[0], "")
        n_bytes = sum(node.payload_bytes for node in self.cache.match(keys, N_TOKENS).nodes)
        per_byte = load_share * N_TOKENS * saver.prefill_seconds_per_token / n_bytes
        gate.read_speed.observe(1e15, 1e15 * per_byte)
        gate.put_speed.observe(1e15, 0.0)

    def evaluated(self, number: int) -> PromptEvaluated:
        events = self.bench.events(f"{number}")
        [evaluated] = [event for event in events if isinstance(event, PromptEvaluated)]
        return evaluated

    def assert_replies_are_right(self) -> None:
        for number, prompt in enumerate(self.prompts):
            assert self.bench.tokens(f"{number}") == expected_reply([*prompt, 7], 1)


@pytest.fixture
def entries_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The conversation and the number of each block that was read, in order."""
    seen: list[tuple[int, int]] = []
    get = DiskTier.get

    def get_and_note(tier: DiskTier, key: Key) -> Entry:
        entry = get(tier, key)
        token = int.from_bytes(entry.header.tokens[:4], "big")
        seen.append((token // 100_000 - 1, entry.header.start // BLOCK_TOKENS))
        return entry

    monkeypatch.setattr(DiskTier, "get", get_and_note)
    return seen


def test_every_first_piece_is_read_before_anyones_fifth(
    tmp_path: Path, clock: Clock, entries_read: list[tuple[int, int]]
) -> None:
    returning = Returning(tmp_path, clock, n_conversations=8)
    returning.submit_all()
    returning.read(8 * N_BLOCKS)
    firsts = [entries_read.index((number, 0)) for number in range(8)]
    fifths = [entries_read.index((number, 4)) for number in range(8)]
    assert max(firsts) < min(fifths)
    assert len(entries_read) == 8 * N_BLOCKS
    returning.assert_replies_are_right()


def test_equal_restores_end_one_after_another(
    tmp_path: Path, clock: Clock, entries_read: list[tuple[int, int]]
) -> None:
    """If they took turns for each piece, all would end at the very end."""
    returning = Returning(tmp_path, clock, n_conversations=8)
    returning.submit_all()
    returning.read(8 * N_BLOCKS)
    lasts = [entries_read.index((number, N_BLOCKS - 1)) for number in range(8)]
    assert lasts == sorted(lasts)
    assert lasts[3] < len(entries_read) * 5 / 8


def test_no_restore_is_given_up_while_reads_arrive(tmp_path: Path, clock: Clock) -> None:
    returning = Returning(tmp_path, clock, n_conversations=32)
    n_before = returning.bench.backend.n_computed
    returning.submit_all()
    returning.read(32 * N_BLOCKS, seconds=PATIENCE_SECONDS * 0.9)
    assert all(returning.evaluated(number).n_cached == N_TOKENS for number in range(32))
    assert returning.bench.backend.n_computed - n_before == 32
    returning.assert_replies_are_right()


def test_a_disk_that_stands_still_is_given_up_by_every_restore(
    tmp_path: Path, clock: Clock
) -> None:
    returning = Returning(tmp_path, clock, n_conversations=8)
    returning.submit_all()
    returning.read(8)
    clock.now += PATIENCE_SECONDS * 1.1
    returning.bench.run()
    assert [returning.evaluated(n).n_cached for n in range(8)] == [BLOCK_TOKENS] * 8
    returning.assert_replies_are_right()


def test_a_cancelled_restore_leaves_the_queue(
    tmp_path: Path, clock: Clock, entries_read: list[tuple[int, int]]
) -> None:
    returning = Returning(tmp_path, clock, n_conversations=3)
    returning.submit_all()
    memory = returning.cache._memory
    n_reserved = memory.n_bytes
    returning.bench.loop.inbox.put(Cancel("0"))
    returning.bench.step()
    assert memory.n_bytes < n_reserved
    returning.read(2 * N_BLOCKS)
    assert {number for number, _ in entries_read} == {1, 2}
    assert returning.evaluated(1).n_cached == returning.evaluated(2).n_cached == N_TOKENS
    assert not returning.cache._disk._reading  # type: ignore[union-attr]
    assert not returning.cache._backlog


def test_a_restore_behind_a_long_queue_is_computed_and_counted(
    tmp_path: Path, clock: Clock
) -> None:
    returning = Returning(tmp_path, clock, n_conversations=8, may_recompute=True)
    returning.measure(load_share=0.5)
    returning.submit(0)
    returning.read(1)
    assert not returning.bench.tokens("0")
    for number in range(1, 8):
        returning.submit(number)
    returning.bench.step()
    returning.read(8 * N_BLOCKS)
    returning.bench.run()
    refused = [returning.evaluated(number).n_refused for number in range(8)]
    assert refused[:3] == [0, 0, 0]
    assert N_TOKENS in refused
    returning.assert_replies_are_right()


def test_a_restore_that_has_taken_long_is_computed_once_that_is_far_faster(
    tmp_path: Path, clock: Clock
) -> None:
    returning = Returning(tmp_path, clock, n_conversations=2, may_recompute=True)
    returning.measure(load_share=0.5)
    returning.submit_all()
    returning.measure(load_share=8.0)
    returning.read(2, seconds=PATIENCE_SECONDS * 0.4)
    assert not returning.bench.tokens("0")
    returning.read(1, seconds=PATIENCE_SECONDS * 0.4)
    returning.bench.run()
    n_cached = [returning.evaluated(number).n_cached for number in range(2)]
    assert [returning.evaluated(n).n_refused for n in range(2)] == [N_TOKENS - n for n in n_cached]
    assert sum(n_cached) == 3 * BLOCK_TOKENS
    returning.assert_replies_are_right()
