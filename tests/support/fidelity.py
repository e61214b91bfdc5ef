"""An engine and a cache with nothing faked between them, and what must be true at every moment.

A World takes operations one by one: requests, and everything that can happen to what is stored.
After each step it compares the engine's accounts with the backend's and the cache's with its
tiers; every reply is compared with that of a run without any cache.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Protocol
from unittest.mock import patch

from rekindle.cache import prefix_cache
from rekindle.cache.block import BLOCK_TOKENS, Entry, Key
from rekindle.cache.disk_store import WriteRules
from rekindle.cache.holdings import STAGED_ENTRIES
from rekindle.cache.prefix_cache import CachePolicy, PrefixCache
from rekindle.cache.prefix_index import Node, Where
from rekindle.cache.prefix_keys import PrefixKeys
from rekindle.cache.tiers.disk import DiskTier
from rekindle.cache.tiers.entry_file import DISK_BLOCK_BYTES
from rekindle.cache.tiers.memory import size_in_memory
from rekindle.cache.transfers import Transfers
from rekindle.config import WritePolicy
from rekindle.engine.loop import Cancel, Delivery, EngineLoop, Submit
from rekindle.errors import (
    ContextFull,
    DecodeFailed,
    EngineError,
    RekindleError,
    ShuttingDown,
    TierFailed,
)
from rekindle.generation import (
    Finished,
    GenerationRequest,
    PromptEvaluated,
    Sampling,
    StopCause,
    TokenSampled,
)
from rekindle.model_state import StateTraits
from tests.support.audited_backend import AuditedBackend, Ledger, Scored
from tests.support.fake_backend import FakeBackend
from tests.support.stepped_transfers import AT_ONCE, Clock, Pace, SteppedTransfers

ROOT = b"r" * 16
MAX_STEPS = 20_000  # of one request; far more than any needs
MAX_STALLS = 20  # steps in a row that can do nothing, with nothing on its way to or from the disk
STEP_BACK = 64  # of a prompt that is stored, a model with states computes at most this many tokens
CATALOG_BYTES = 150_000  # of a disk budget, that go to the catalogue
ROOMY_ENTRIES = 1000
MAX_TEXTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    n_slots: int = 2
    n_cells: int = 2048
    n_ubatch: int = 256
    memory_entries: int = ROOMY_ENTRIES  # the budget, in entries of the usual size
    disk_entries: int | None = ROOMY_ENTRIES  # None: no disk
    write_policy: WritePolicy = WritePolicy.ALL
    min_tokens: int = 0
    written_per_hour: int = 0  # entries; 0: no limit
    min_path_checkpoints: int = 16
    may_recompute: bool = False
    has_threads: bool = False  # as in a server; then no two runs are the same


class Subject(Protocol):
    """A model, as the world sees it."""

    entry_bytes: int  # of a block or a checkpoint, whichever is larger

    def new_backend(self, setup: Setup, ledger: Ledger) -> AuditedBackend: ...

    def text(self, seed: int, n_tokens: int) -> list[int]: ...

    def check_reply(
        self, prompt: list[int], reply: list[int], end: StopCause | None, scored: list[Scored]
    ) -> None:
        """That it is what a cold run gives. `end` is None for a reply that was cut off."""
        ...


@dataclass(slots=True, eq=False)
class Asked:
    prompt: list[int]
    cache_prompt: bool
    fortune: int  # see World
    n_stored: int  # tokens of the prompt that could be restored when it came
    tokens: list[int] = field(default_factory=list)
    evaluated: PromptEvaluated | None = None
    end: Finished | RekindleError | None = None


class Ending(Enum):
    STOP = auto()
    CRASH = auto()  # what was on its way to the disk is lost


class Damage(Enum):
    FLIP = auto()
    CUT = auto()
    DELETE = auto()


class Failure(Enum):
    DECODE = auto()
    DECODE_IN_DISORDER = auto()
    DECODE_FULL = auto()
    EXPORT = auto()
    IMPORT = auto()
    IMPORT_FULL = auto()


class FlakyDiskTier(DiskTier):
    n_failing_calls = 0

    def get(self, key: Key) -> Entry:
        self._fail_if_told()
        return super().get(key)

    def put(self, entry: Entry) -> list[Key]:
        self._fail_if_told()
        return super().put(entry)

    def _fail_if_told(self) -> None:
        if self.n_failing_calls:
            self.n_failing_calls -= 1
            raise TierFailed("told to")


class World:
    def __init__(self, subject: Subject, setup: Setup, directory: Path) -> None:
        self.texts: list[list[int]] = []  # prompts with their replies, the latest last
        self.prompts: list[list[int]] = []  # that were answered
        self.n_requests = 0
        self.counts: Counter[str] = Counter()  # of what happened inside, for whoever wonders
        self._subject = subject
        self._setup = setup
        self._directory = directory
        self._ledger = Ledger()
        self._stack = ExitStack()
        self._clock = Clock()
        if not setup.has_threads:
            self._stack.enter_context(self._clock.installed())
        self._stack.enter_context(
            patch.object(prefix_cache, "MIN_PATH_CHECKPOINTS", setup.min_path_checkpoints)
        )
        self._last: Asked | None = None  # that was answered and kept
        self._alive: dict[str, Asked] = {}
        self._said: list[Delivery] = []
        self._private: set[PrefixKeys] = set()  # of requests that are not to be kept
        self._is_damaged = False  # files were changed behind the cache's back
        self._n_mishaps = 0  # of everything after which less may be reused than was stored
        self._open(subject.new_backend(setup, self._ledger))

    def _open(self, backend: AuditedBackend) -> None:
        self.backend = backend
        backend.witness = self
        self._transfers: Transfers | None = None
        self.loop = EngineLoop(backend, self._said.extend, self._open_cache, queue_size=8)
        self.loop.start()

    def _open_cache(self, traits: StateTraits, notify: Callable[[], None]) -> PrefixCache:
        setup = self._setup
        if setup.disk_entries is not None:
            self._tier = FlakyDiskTier(
                self._directory,
                fingerprint=ROOT,
                budget_bytes=self._disk_bytes(setup.disk_entries),
                is_leased=lambda key: self.cache.is_leased(key),
                now=self._clock.time,
            )
            self._transfers = (Transfers if setup.has_threads else SteppedTransfers)(
                self._tier, notify
            )
        policy = CachePolicy(
            memory_bytes=setup.memory_entries * size_in_memory(self._subject.entry_bytes),
            disk_bytes=self._disk_bytes(setup.disk_entries or 0),
            writes=WriteRules(
                bytes_per_hour=setup.written_per_hour * self._subject.entry_bytes,
                policy=setup.write_policy,
                min_tokens=setup.min_tokens,
            ),
            may_recompute=setup.may_recompute,
        )
        self.cache = PrefixCache(ROOT, traits, policy, self._transfers)
        return self.cache

    def may_export(self, slot: int) -> bool:
        sequence = self.loop._slots.all[slot].sequence
        return sequence is None or sequence.request.cache_prompt

    def on_decode(self, n_tokens: int) -> None:
        """What is computed takes time, and more so behind many rows."""
        self._clock.now += 1e-4 * n_tokens + 1e-5 * self.loop._slots.n_cells_used

    def _disk_bytes(self, n_entries: int) -> int:
        return CATALOG_BYTES + n_entries * (self._subject.entry_bytes + 2 * DISK_BLOCK_BYTES)

    def wanted(self, slot: int) -> list[int]:
        keys = self.loop._slots.all[slot].keys
        return [] if keys is None else keys.tokens

    @property
    def _writing(self) -> dict[Key, Node]:
        return self.cache._disk._writing if self.cache._disk else {}

    @property
    def _reading(self) -> dict[Key, int]:
        """Bytes that are reserved."""
        return self.cache._disk._reading if self.cache._disk else {}

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
        """After a failure: nothing is true any more, and nothing is checked."""
        self._stack.close()
        if isinstance(self._transfers, SteppedTransfers):
            self._transfers.crash()
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
            self._fortune(),
            self._n_stored(prompt, len(prompt) - 1),
        )
        request = GenerationRequest(
            id=name,
            prompt=tuple(prompt),
            boundaries=tuple(each for each in boundaries if 0 < each <= len(prompt)),
            sampling=Sampling(temperature=0),
            max_tokens=n_reply,
            cache_prompt=cache_prompt,
        )
        self.loop.inbox.put(Submit(request))
        return name

    def finish(self, pace: Pace = AT_ONCE) -> None:
        """Steps until every request has its reply."""
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
        """True: something moved to or from the disk."""
        self._obey_orders()
        n_armed = self._n_armed()
        self._step_as_run_does()
        n_failures = n_armed - self._n_armed()
        self._n_mishaps += n_failures
        self._hear(may_fail=n_failures > 0)
        did_work = self._work(pace)
        self.check()
        return did_work

    def settle(self) -> None:
        """Ends every request and everything that is on its way to or from the disk."""
        self.finish()
        for _ in range(MAX_STEPS):
            if not self.step() and self.loop._is_stalled and not self._writing:
                break
        self._check_disk()

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
        """Everything that may leave the RAM tier does."""
        memory = self.cache._memory
        budget_bytes, memory.budget_bytes = memory.budget_bytes, 0
        self.cache._holdings.shrink()
        memory.budget_bytes = budget_bytes
        self._n_mishaps += 1
        self.check()

    def demote(self) -> None:
        """All that is stored is on disk, and in memory nothing is."""
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

    def damage(self, which: int, how: Damage, offset: int) -> None:
        files = sorted(self._directory.glob("entries/*/*.kv"))
        if not files:
            return
        path = files[which % len(files)]
        data = bytearray(path.read_bytes())
        if not data:
            return
        self._n_mishaps += 1
        self._is_damaged = True
        if how is Damage.DELETE:
            path.unlink()
            return
        if how is Damage.CUT:
            del data[offset % len(data) :]
        else:
            data[offset % len(data)] ^= 1 << offset % 8
        path.write_bytes(data)

    def fail_disk(self, n_calls: int) -> None:
        if self._transfers is None:
            return
        self._tier.n_failing_calls = n_calls
        self._n_mishaps += 1
        self._is_damaged = True  # what cannot be read now is given up

    def fail_next(self, failure: Failure) -> None:
        """Only a fake can be told to."""
        backend = self.backend.inner
        if not isinstance(backend, FakeBackend):
            return
        self._n_mishaps += 1
        match failure:
            case Failure.DECODE:
                backend.decode_failures.append(DecodeFailed("told to", rows_intact=True))
            case Failure.DECODE_IN_DISORDER:
                backend.decode_failures.append(DecodeFailed("told to"))
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

    def _step_as_run_does(self) -> None:
        """An export that fails ends every request; anything else that is raised is a bug."""
        unexpected: list[Exception] = []

        def step() -> None:
            n_failures = len(self.backend.export_failures)
            try:
                self.loop.step()
            except Exception as error:
                if len(self.backend.export_failures) == n_failures:
                    unexpected.append(error)
                raise

        self.loop._guarded(step)
        self.loop.flush()
        if unexpected:
            raise unexpected[0]

    def _work(self, pace: Pace) -> bool:
        if not isinstance(self._transfers, SteppedTransfers):
            return self._transfers is not None
        n_done = self._transfers.work(pace)
        if not n_done and self.loop._is_stalled:
            n_done = self._transfers.work(Pace(1, 1))
        return n_done > 0

    def _end(self, ending: Ending) -> None:
        self._n_mishaps += 1
        if ending is Ending.CRASH and isinstance(self._transfers, SteppedTransfers):
            self._transfers.crash()
            for asked in self._alive.values():
                self._check_reply(asked, None)
            self._alive.clear()
            self.backend.samplers.clear()
        else:
            self.backend.export_failures.clear()
            self._obey_orders()
            self.loop.stop()
            self.loop.flush()
            self._hear(may_fail=True)
        assert self.is_idle
        self._said.clear()
        self.counts["pieces compared"] += self.backend.n_pieces_compared
        self.backend.n_pieces_compared = 0
        self.counts.update(asdict(self.cache.status().counters))

    def _n_armed(self) -> int:
        backend = self.backend.inner
        n_armed = len(self.backend.export_failures)
        if isinstance(backend, FakeBackend):
            n_armed += len(backend.decode_failures) + len(backend.import_failures)
        return n_armed

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

    # What must be true.

    def _check_reply(self, asked: Asked, end: StopCause | None) -> None:
        self._subject.check_reply(asked.prompt, asked.tokens, end, self.backend.scored)
        if self.is_idle:
            self.backend.scored.clear()

    def _check_reuse(self, asked: Asked) -> None:
        assert asked.evaluated
        n_cached, n_prompt = asked.evaluated.n_cached, len(asked.prompt)
        assert n_cached < n_prompt
        assert asked.cache_prompt or n_cached == 0
        if asked.fortune != self._fortune() or not asked.cache_prompt:
            return
        has_room = n_prompt + STEP_BACK + BLOCK_TOKENS <= self.backend.n_cells
        if self._is_damaged or self._setup.may_recompute or not has_room:
            return
        least = asked.n_stored
        last, is_roomy = self._last, self._setup.memory_entries >= ROOMY_ENTRIES
        if last and last.prompt == asked.prompt and last.fortune == asked.fortune and is_roomy:
            least = n_prompt - (STEP_BACK if self.backend.traits.has_checkpoints else 1)
        assert n_cached >= least, f"{n_cached} of {n_prompt} tokens were reused, not {least}"

    def _fortune(self) -> int:
        """The same as before: nothing happened after which less may be reused."""
        counters = self.cache.status().counters
        return self._n_mishaps + counters.memory_evictions + counters.disk_evictions

    def _n_stored(self, prompt: list[int], n_limit: int) -> int:
        return self.cache.match(PrefixKeys(ROOT, prompt), n_limit).n_tokens

    def check(self) -> None:
        self._check_slots()
        self._check_index()
        self._check_memory()
        if self.is_idle:
            self._check_nothing_is_held()

    def _check_slots(self) -> None:
        slots = self.loop._slots
        for slot in slots.all:
            held = self.backend.tokens(slot.id)
            assert len(held) == slot.n_rows
            assert held == self.wanted(slot.id)[: slot.n_rows]
            if slot.sequence and not slot.sequence.request.cache_prompt:
                self._private.add(slot.sequence.keys)
            assert slot.sequence or slot.keys not in self._private
        if isinstance(self.backend.inner, FakeBackend):
            assert self.loop.status().n_cells_used == self.backend.inner.n_cells_used
        assert slots.n_cells_used <= slots.n_cells

    def _check_index(self) -> None:
        index, holdings = self.cache._index, self.cache._holdings
        index.check()
        in_memory = {node.key for node in index.nodes() if node.where & Where.MEMORY}
        assert in_memory == set(self.cache._memory._entries)
        assert holdings.n_on_disk == sum(bool(n.where & Where.DISK) for n in index.nodes())
        may_leave = {
            node.key
            for node in index.nodes()
            if node.where & Where.MEMORY
            and not node.leases
            and (node.where & Where.DISK or node.is_leaf)
        }
        assert may_leave == set(holdings._queue._tickets)

    def _check_memory(self) -> None:
        memory, sizes = self.cache._memory, self._sizes_in_memory()
        assert memory.n_bytes == sum(sizes)
        # One entry may pass through for each sequence that could not go on without it.
        n_passing_bytes = self._setup.n_slots * max(sizes, default=0)
        assert memory.n_bytes <= self._allowed_bytes() + n_passing_bytes

    def _allowed_bytes(self) -> int:
        staged_bytes = STAGED_ENTRIES * max(self._sizes_in_memory(), default=0)
        return max(self.cache._memory.budget_bytes, staged_bytes)

    def _sizes_in_memory(self) -> list[int]:
        """Of what is there, and of what is on its way."""
        held = [entry.header.payload_bytes for entry in self.cache._memory._entries.values()]
        return [size_in_memory(n_bytes) for n_bytes in (*held, *self._reading.values())]

    def _check_disk(self) -> None:
        assert not self._writing
        assert not self._reading
        assert self.cache._memory.n_bytes <= self._allowed_bytes()
        on_disk = {node.key for node in self.cache._index.nodes() if node.where & Where.DISK}
        files = {bytes.fromhex(path.stem) for path in self._directory.glob("entries/*/*.kv")}
        assert files == on_disk or self._is_damaged

    def _check_nothing_is_held(self) -> None:
        writing = self._writing
        for node in self.cache._index.nodes():
            assert node.leases == (writing.get(node.key) is node), f"{node.leases} leases"
        assert all(sampler.is_closed for sampler in self.backend.samplers)
        status = self.loop.status()
        assert (status.n_running, status.n_waiting) == (0, 0)
