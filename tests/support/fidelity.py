"""A real engine and a real cache, with facts that must hold after every step.

A World takes operations one by one: requests, and everything that can happen to what is stored.
After each step it compares the engine's accounts with the backend's and the cache's with its
tiers; every reply is compared with that of a run without any cache.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rekindle.cache import entry_writer
from rekindle.cache.disk.transfers import DiskTransfers, disk_pool
from rekindle.cache.entry import BLOCK_TOKENS
from rekindle.cache.keys import PrefixKeys
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.loop import EngineLoop
from rekindle.engine.orders import Cancel, Delivery
from rekindle.errors import (
    ContextFull,
    DecodeFailed,
    EngineError,
    RekindleError,
    ShuttingDown,
    TierFailed,
)
from rekindle.generation.events import Finished, PromptEvaluated, StopCause, TokenSampled
from rekindle.generation.model_state import StateTraits
from rekindle.generation.request import GenerationRequest, Sampling
from rekindle.link.activity_page import ActivityPage, new_page_file
from tests.support.accounts import (
    being_read,
    being_written,
    check_files,
    check_index,
    check_memory,
    check_nothing_is_held,
    check_nothing_moves,
    check_slots,
)
from tests.support.audited_backend import AuditedBackend, Ledger
from tests.support.fake_backend import FakeBackend
from tests.support.fake_embedder import FakeEmbedder
from tests.support.fidelity_setup import ROOMY_ENTRIES, ROOT, FlakyDiskTier, Setup, Subject
from tests.support.preparers import PreparingAtOnce
from tests.support.stepped_transfers import AT_ONCE, Clock, Pace, SteppedPool

MAX_STEPS = 20_000  # of one request; far more than any needs
STALL_SECONDS = 0.0005  # for real threads to do something
MAX_STALLS = 20  # steps in a row that can do nothing, with nothing on its way to or from the disk
STEP_BACK = 64  # of a prompt that is stored, a model with states computes at most this many tokens
MAX_TEXTS = 16
PIECES_COMPARED = "pieces compared"  # restored blocks and checkpoints, in `World.counts`


@dataclass(slots=True, eq=False)
class Asked:
    prompt: list[int]
    cache_prompt: bool
    n_stored: int  # tokens of the prompt that could be restored when it came
    n_mishaps: int  # until then
    n_evictions: int
    is_after_settling: bool
    tokens: list[int] = field(default_factory=list)
    evaluated: PromptEvaluated | None = None


class Ending(Enum):
    STOP = auto()
    CRASH = auto()  # what was on its way to the disk is lost


class Damage(Enum):
    FLIP = auto()
    CUT = auto()
    DELETE = auto()


class Failure(Enum):
    DECODE = auto()
    DECODE_FULL = auto()
    EXPORT = auto()
    IMPORT = auto()
    IMPORT_FULL = auto()


class World:
    """With `has_threads` bytes move as in a server, and no two runs are the same."""

    def __init__(
        self, subject: Subject, setup: Setup, directory: Path, *, has_threads: bool = False
    ) -> None:
        self.texts: list[list[int]] = []  # prompts with their replies, the latest last
        self.prompts: list[list[int]] = []  # that were answered
        self.n_requests = 0
        self.counts: Counter[str] = Counter()  # internal events, for reports
        self._subject = subject
        self._setup = setup
        self._directory = directory
        self._ledger = Ledger()
        self._stack = ExitStack()
        self._clock = Clock()
        self._make_pool = disk_pool if has_threads else SteppedPool
        if not has_threads:
            self._stack.enter_context(self._clock.installed())
        self._stack.enter_context(
            patch.object(entry_writer, "MIN_PATH_CHECKPOINTS", setup.min_path_checkpoints)
        )
        self._last: Asked | None = None  # that was answered and kept
        self._alive: dict[str, Asked] = {}
        self._said: list[Delivery] = []
        self._private: set[PrefixKeys] = set()  # of requests that are not to be kept
        self._is_settled = True
        self._is_damaged = False  # files or calls fail: nothing that is stored can be counted on
        self._n_mishaps = 0  # of everything after which less may be reused than was stored
        self._open(subject.new_backend(setup, self._ledger))

    def _open(self, backend: AuditedBackend) -> None:
        self.backend = backend
        backend.witness = self
        self._transfers: DiskTransfers | None = None
        self.loop = EngineLoop(
            backend,
            self._said.extend,
            self._open_cache,
            queue_size=8,
            embedder=FakeEmbedder(),
            preparer=PreparingAtOnce(),
            activity=ActivityPage(new_page_file()),
        )
        self.loop.start()

    def _open_cache(self, traits: StateTraits, notify: Callable[[], None]) -> PrefixCache:
        setup, entry_bytes = self._setup, self._subject.entry_bytes
        if setup.disk_entries is not None:
            self._tier = FlakyDiskTier(
                self._directory,
                setup.disk_bytes(entry_bytes),
                is_leased=lambda key: self.cache.is_leased(key),
                now=self._clock.time,
            )
            self._transfers = DiskTransfers(self._tier, self._make_pool(notify))
        self.cache = PrefixCache(ROOT, traits, setup.policy(entry_bytes), self._transfers, None)
        return self.cache

    def wanted(self, slot: int) -> list[int]:
        keys = self.loop._slots.all[slot].keys
        return [] if keys is None else keys.tokens

    def may_export(self, slot: int) -> bool:
        sequence = self.loop._slots.all[slot].sequence
        return sequence is None or sequence.request.cache_prompt

    def on_decode(self, n_tokens: int) -> None:
        """Let computing take time, more of it behind many rows."""
        self._clock.now += 1e-4 * n_tokens + 1e-5 * self.loop._slots.n_cells_used

    @property
    def n_alive(self) -> int:
        return len(self._alive)

    @property
    def is_idle(self) -> bool:
        return not self._alive

    def close(self) -> None:
        self._end(Ending.STOP)
        self.backend.close()
        self._stack.close()

    def abandon(self) -> None:
        """Discard the world after a failure, without checks."""
        self._stack.close()
        self._crash()
        if not isinstance(self.backend.inner, FakeBackend):
            self.backend.close()

    # Operations.

    def submit(
        self,
        prompt: list[int],
        n_reply: int,
        *,
        cache_prompt: bool = True,
        boundaries: tuple[int, ...] = (),
    ) -> str:
        prompt = prompt[: self.backend.n_ctx - 1] or self._subject.text(0, 1)
        self._clock.now += 1.0
        name = str(self.n_requests)
        self.n_requests += 1
        if not self.is_idle:
            self._n_mishaps += 1  # one that does not run alone may find less than there is
        self._alive[name] = Asked(
            prompt,
            cache_prompt,
            n_stored=self.cache.match(PrefixKeys(ROOT, prompt), len(prompt) - 1).n_tokens,
            n_mishaps=self._n_mishaps,
            n_evictions=self._n_evictions(),
            is_after_settling=self._is_settled,
        )
        self._is_settled = False
        request = GenerationRequest(
            id=name,
            prompt=tuple(prompt),
            boundaries=tuple(each for each in boundaries if 0 < each <= len(prompt)),
            sampling=Sampling(temperature=0),
            max_tokens=n_reply,
            cache_prompt=cache_prompt,
        )
        self.loop.inbox.put(request)
        return name

    def finish(self, pace: Pace = AT_ONCE) -> None:
        """Take steps until every request has its reply."""
        n_stalls = 0
        for _ in range(MAX_STEPS):
            if self.is_idle:
                return
            did_work = self.step(pace)
            n_stalls = n_stalls + 1 if self.loop._is_stalled and not did_work else 0
            assert n_stalls < MAX_STALLS, "the loop waits for something that will not come"
        raise AssertionError("still running")

    def take_steps(self, n_steps: int, pace: Pace) -> None:
        for _ in range(n_steps):
            self.step(pace)

    def step(self, pace: Pace = AT_ONCE) -> bool:
        """Take a step and do disk jobs. Return True if there were any."""
        self._obey_orders()
        n_armed = self._n_decodes_to_fail()
        self.loop.step()
        self.loop.outbox.flush()
        self._hear(may_fail=self._n_decodes_to_fail() < n_armed)
        did_work = self._work(pace)
        self.check()
        return did_work

    def settle(self) -> None:
        """Finish every request and every disk transfer."""
        self.finish()
        for _ in range(MAX_STEPS):
            if not self.step() and self.loop._is_stalled:
                break
        self._is_settled = True
        check_nothing_moves(self.cache)
        if not self._is_damaged:
            check_files(self.cache, self._directory)

    def cancel(self, which: int) -> None:
        if self.is_idle:
            return
        name = list(self._alive)[which % len(self._alive)]
        self.loop.inbox.put(Cancel(name))
        self.step()
        if asked := self._alive.pop(name, None):  # unless it ended in the same step
            self._check_reply(asked, None)
        self._n_mishaps += 1

    def drop_memory(self) -> None:
        """Evict everything from memory that may leave it."""
        n_known = len(self.cache._index)
        memory = self.cache._memory
        budget_bytes, memory.budget_bytes = memory.budget_bytes, 0
        self.cache._holdings.shrink()
        memory.budget_bytes = budget_bytes
        self._n_mishaps += len(self.cache._index) < n_known
        self.check()

    def demote(self) -> None:
        """Move all entries from memory to disk."""
        for _ in range(MAX_STEPS):
            if not self._is_moving():
                break
            self._work(AT_ONCE)
            self.cache.poll()
        self.drop_memory()

    def restart(self, ending: Ending, *, fresh_backend: bool) -> None:
        self._end(ending)
        if fresh_backend:
            self.backend.close()
            self._open(self._subject.new_backend(self._setup, self._ledger))
        else:
            self.backend.clear_all()
            self._open(self.backend)
        self.check()

    def damage(self, first: int, stride: int, how: Damage, offset: int) -> None:
        files = sorted(self._directory.glob("entries/*/*.kv"))
        if not files or self._setup.is_calm:
            return
        self._is_damaged = True
        for path in files[first % len(files) :: stride]:
            with suppress(FileNotFoundError):  # the cache itself may delete it at any time
                _damage(path, how, offset)

    def fail_disk(self, n_calls: int) -> None:
        if self._transfers is None or self._setup.is_calm:
            return
        self._tier.n_failing_calls = n_calls
        self._is_damaged = True  # what cannot be read now is given up

    def fail_next(self, failure: Failure) -> None:
        """Let the next call of a fake backend fail."""
        backend = self.backend.inner
        if not isinstance(backend, FakeBackend) or self._setup.is_calm:
            return
        self._is_damaged = True  # until nobody knows when
        match failure:
            case Failure.DECODE:
                backend.decode_failures.append(DecodeFailed("told to", rows_intact=True))
            case Failure.DECODE_FULL:
                backend.decode_failures.append(ContextFull("told to"))
            case Failure.EXPORT:
                self.backend.export_failures.append(EngineError("told to"))
            case Failure.IMPORT:
                backend.import_failures.append(EngineError("told to"))
            case Failure.IMPORT_FULL:
                backend.import_failures.append(ContextFull("told to"))

    def wait(self, seconds: float) -> None:
        self._clock.now += seconds
        self.step()

    # How they are carried out.

    def _obey_orders(self) -> None:
        self.loop.inbox.put(Cancel("nobody"))  # receive() blocks on an empty inbox when idle
        self.loop.receive()

    def _work(self, pace: Pace) -> bool:
        """Do disk jobs. Return True if a transfer is under way."""
        if (pool := self._stepped_pool) is not None:
            n_done = pool.work(pace)
            if not n_done and self.loop._is_stalled:
                n_done = pool.work(Pace(1, 1))
            return n_done > 0
        if self.loop._is_stalled:
            time.sleep(STALL_SECONDS)
        return self._is_moving()

    @property
    def _stepped_pool(self) -> SteppedPool | None:
        pool = self._transfers.pool if self._transfers is not None else None
        return pool if isinstance(pool, SteppedPool) else None

    def _crash(self) -> None:
        """What was not done is lost."""
        if self._stepped_pool is not None:
            with suppress(TierFailed):
                self._tier.close()

    def _is_moving(self) -> bool:
        return bool(being_written(self.cache) or being_read(self.cache))

    def _end(self, ending: Ending) -> None:
        if ending is Ending.CRASH or not self._setup.keeps_all or not self._is_settled:
            self._n_mishaps += 1
        if ending is Ending.CRASH and self._stepped_pool is not None:
            self._crash()
            for asked in self._alive.values():
                self._check_reply(asked, None)
            self._alive.clear()
            self.backend.samplers.clear()
        else:
            self._obey_orders()
            self.loop.stop()
            self.loop.outbox.flush()
            self._hear(may_fail=True)
        assert self.is_idle
        self._said.clear()
        self.counts[PIECES_COMPARED] += self.backend.n_pieces_compared
        self.backend.n_pieces_compared = 0
        self.counts.update(_flat(asdict(self.cache.counters)))

    def _n_decodes_to_fail(self) -> int:
        """Return the pending decode failures. No other failure may end a request."""
        backend = self.backend.inner
        return len(backend.decode_failures) if isinstance(backend, FakeBackend) else 0

    def _hear(self, *, may_fail: bool) -> None:
        for name, event in self._said:
            asked = self._alive.get(name)
            assert asked, f"request {name} had ended, or was cancelled: {event}"
            match event:
                case TokenSampled(token):
                    assert asked.evaluated
                    asked.tokens.append(token)
                case PromptEvaluated():
                    assert asked.evaluated is None
                    asked.evaluated = event
                case Finished(cause):
                    self._check_reply(self._alive.pop(name), cause)
                    self._check_reuse(asked)
                    self._keep(asked)
                case RekindleError():
                    assert may_fail or isinstance(event, ShuttingDown), repr(event)
                    self._check_reply(self._alive.pop(name), None)
        self._said.clear()

    def _keep(self, asked: Asked) -> None:
        if asked.cache_prompt:
            self.prompts = [*self.prompts[-MAX_TEXTS:], asked.prompt]
            self._last = asked
        self.texts = [*self.texts[-MAX_TEXTS:], asked.prompt + asked.tokens]

    # Checks.

    def _check_reply(self, asked: Asked, end: StopCause | None) -> None:
        self._subject.check_reply(asked.prompt, asked.tokens, end, self.backend.scored)
        if self.is_idle:
            self.backend.scored.clear()

    def _check_reuse(self, asked: Asked) -> None:
        assert asked.evaluated
        n_cached, n_prompt = asked.evaluated.n_cached, len(asked.prompt)
        is_dense = self.backend.traits.is_dense  # then the logits after a prompt are kept
        assert n_cached <= n_prompt if is_dense else n_cached < n_prompt
        assert asked.cache_prompt or n_cached == 0
        if asked.cache_prompt and self._had_luck(asked):
            least = max(asked.n_stored, self._least_of_a_repeated(asked))
            assert n_cached >= least, f"{n_cached} of {n_prompt} tokens were reused, not {least}"

    def _had_luck(self, asked: Asked) -> bool:
        """Whether nothing changed the store between the save and the request."""
        setup = self._setup
        return (
            asked.n_mishaps == self._n_mishaps
            and not self._is_damaged
            and not setup.may_recompute
            and (setup.keeps_all or asked.n_evictions == self._n_evictions())
            and len(asked.prompt) + STEP_BACK + BLOCK_TOKENS <= self.backend.n_cells
        )

    def _least_of_a_repeated(self, asked: Asked) -> int:
        """Return how many tokens of the last prompt must be reused, in any tier."""
        last, has_states = self._last, self.backend.traits.has_checkpoints
        if last is None or last.prompt != asked.prompt or last.n_mishaps != asked.n_mishaps:
            return 0
        is_stored = self._setup.memory_entries >= ROOMY_ENTRIES or (
            self._setup.keeps_all and asked.is_after_settling and not has_states
        )
        return len(asked.prompt) - (STEP_BACK if has_states else 1) if is_stored else 0

    def _n_evictions(self) -> int:
        return self.cache.counters.memory.evictions + self.cache.counters.disk.evictions

    def check(self) -> None:
        check_slots(self.loop, self.backend)
        check_index(self.cache)
        check_memory(self.cache, self.backend.n_slots)
        for slot in self.loop._slots.all:
            if slot.sequence and not slot.sequence.request.cache_prompt:
                self._private.add(slot.sequence.keys)
            assert slot.sequence or slot.keys not in self._private
        if self.is_idle:
            check_nothing_is_held(self.loop, self.cache, self.backend)


def _flat(counters: Mapping[str, Any]) -> dict[str, int]:
    """By names such as "disk.writes"."""
    flat: dict[str, int] = {}
    for name, value in counters.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{each}": n for each, n in _flat(value).items()}
        else:
            flat[name] = value
    return flat


def _damage(path: Path, how: Damage, offset: int) -> None:
    data = bytearray(path.read_bytes())
    match how:
        case Damage.DELETE:
            path.unlink()
        case Damage.CUT:
            path.write_bytes(data[: offset % (len(data) + 1)])
        case Damage.FLIP if data:
            data[offset % len(data)] ^= 1 << offset % 8
            path.write_bytes(data)
