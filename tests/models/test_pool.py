"""The pool on fakes: which models are loaded, unloaded, and kept."""

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from rekindle.errors import (
    ModelInUse,
    ModelLoadFailed,
    ShuttingDown,
    StartupError,
    UnknownModel,
)
from rekindle.generation.events import CacheSource
from rekindle.generation.status import CacheCounters, CacheStatus, EngineStatus, TierStatus
from rekindle.models.card import FileCard, ModelState
from rekindle.models.pool import ModelPool
from rekindle.models.serving_model import ServingEngine, ServingModel
from rekindle.observe.telemetry import total
from tests.api.fakes import CARD, FakeResponder, as_responder

GIB = 2**30
NAMES = ("a", "b", "c")


class FakeModel:
    """The engine of one model, and what the model holds."""

    def __init__(self, name: str, n_bytes: int) -> None:
        self.card = replace(CARD, id=name)
        self.responder = as_responder(FakeResponder())
        self.n_bytes = n_bytes
        self.is_started = False
        self.is_closed = False

    def serving(self) -> ServingModel:
        engine = cast(ServingEngine, self)
        return ServingModel(
            self.card, self.responder, engine, n_bytes=lambda: self.n_bytes, close=self.close
        )

    def start(self) -> None:
        self.is_started = True

    def status(self) -> EngineStatus:
        return self.responder.status()

    async def refresh(self) -> None: ...

    async def shut_down(self, grace_seconds: float) -> None:
        pass

    def cut(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@dataclass
class FakeLoader:
    """Keeps what it was asked for; a load waits for `may_go_on`."""

    sizes: dict[str, int] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    models: list[FakeModel] = field(default_factory=list)
    fault: Exception | None = None
    began: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_go_on.set()

    def n_bytes(self, name: str) -> int:
        return self.sizes.get(name, GIB)

    def file_card(self, name: str) -> FileCard | None:
        return FileCard(architecture=name, chat_template="", n_ctx_train=8)

    def load(self, name: str, on_progress: Callable[[float], bool]) -> ServingModel:
        self.loads.append(name)
        self.began.set()
        assert self.may_go_on.wait(10)
        if not on_progress(0.5):
            raise StartupError("It was given up.")
        if self.fault is not None:
            raise self.fault
        model = FakeModel(name, self.n_bytes(name))
        self.models.append(model)
        return model.serving()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001  # no two uses at the same time
        return self.now


@dataclass
class Setup:
    loader: FakeLoader = field(default_factory=FakeLoader)
    clock: Clock = field(default_factory=Clock)

    def pool(
        self,
        *names: str,
        default: str | None = None,
        memory_bytes: int = 2 * GIB,
        keep_alive_seconds: float = 0.0,
        own_keep_alive: Mapping[str, float] | None = None,
        pinned: str = "",
    ) -> ModelPool:
        return ModelPool(
            names or NAMES,
            self.loader,
            default=default,
            memory_bytes=memory_bytes,
            keep_alive_seconds=keep_alive_seconds,
            own_keep_alive=own_keep_alive or {},
            pinned=pinned,
            clock=self.clock,
        )


def present(pool: ModelPool) -> str:
    return "".join(model.id for model in pool.listed() if model.state is ModelState.LOADED)


async def use(pool: ModelPool, name: str | None) -> str:
    with await pool.lease(name) as served:
        return served.card.id


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - a task of the pool's own
            await asyncio.sleep(0.001)


async def began(loader: FakeLoader) -> None:
    assert await asyncio.to_thread(loader.began.wait, 10)


def run(scenario: Callable[[Setup], Awaitable[None]]) -> None:
    async def within() -> None:
        await scenario(Setup())

    asyncio.run(within())


def test_requests_that_come_at_once_load_a_model_once() -> None:
    async def scenario(setup: Setup) -> None:
        setup.loader.may_go_on.clear()
        pool = setup.pool()
        waiting = [asyncio.create_task(use(pool, "a")) for _ in range(5)]
        await began(setup.loader)
        assert pool.find("a").state is ModelState.LOADING
        setup.loader.may_go_on.set()
        assert await asyncio.gather(*waiting) == ["a"] * 5
        assert setup.loader.loads == ["a"]
        assert setup.loader.models[0].is_started

    run(scenario)


def test_the_file_describes_a_model_until_it_is_loaded() -> None:
    async def scenario(setup: Setup) -> None:
        pool = setup.pool()
        before = await pool.file_card("a:latest")
        assert before is not None
        assert before.architecture == "a"
        assert setup.loader.loads == []
        await use(pool, "a")
        assert await pool.file_card("a") is pool.find("a").card
        with pytest.raises(UnknownModel):
            await pool.file_card("missing")

    run(scenario)


def test_one_that_stops_waiting_does_not_stop_the_load() -> None:
    async def scenario(setup: Setup) -> None:
        setup.loader.may_go_on.clear()
        pool = setup.pool()
        impatient = asyncio.create_task(use(pool, "a"))
        patient = asyncio.create_task(use(pool, "a"))
        await began(setup.loader)
        impatient.cancel()
        setup.loader.may_go_on.set()
        assert await patient == "a"

    run(scenario)


def test_the_least_recently_used_makes_room() -> None:
    async def scenario(setup: Setup) -> None:
        pool = setup.pool()
        for name in ("a", "b", "a", "c"):
            await use(pool, name)
        assert present(pool) == "ac"
        assert [model.is_closed for model in setup.loader.models] == [False, True, False]

    run(scenario)


def test_one_model_larger_than_the_budget_is_loaded_alone() -> None:
    async def scenario(setup: Setup) -> None:
        setup.loader.sizes["c"] = 10 * GIB
        pool = setup.pool()
        for name in ("a", "b", "c"):
            await use(pool, name)
        assert present(pool) == "c"

    run(scenario)


def test_a_model_in_use_stays_and_who_needs_its_memory_waits() -> None:
    async def scenario(setup: Setup) -> None:
        pool = setup.pool(memory_bytes=GIB)
        lease = await pool.lease("a")
        shared = lease.share()
        lease.end()
        lease.end()
        other = asyncio.create_task(use(pool, "b"))
        await asyncio.sleep(0.05)  # for what must not happen
        assert present(pool) == "a"
        assert setup.loader.loads == ["a"]
        with pytest.raises(ModelInUse):
            await pool.unload("a")
        shared.end()
        assert await other == "b"
        assert setup.loader.loads == ["a", "b"]

    run(scenario)


def test_a_model_that_is_never_idle_does_not_keep_another_out() -> None:
    async def scenario(setup: Setup) -> None:
        pool = setup.pool(memory_bytes=GIB)
        lease = await pool.lease("a")
        other = asyncio.create_task(use(pool, "b"))
        async with asyncio.timeout(10):
            while not other.done():
                following = asyncio.create_task(pool.lease("a"))
                await asyncio.sleep(0.001)
                lease.end()
                lease = await following
        assert setup.loader.loads == ["a", "b", "a"]

    run(scenario)


def test_models_that_turn_out_larger_leave_when_they_are_idle() -> None:
    async def scenario(setup: Setup) -> None:
        pool = setup.pool()
        await use(pool, "a")
        with await pool.lease("b"):
            setup.loader.models[1].n_bytes = 2 * GIB
            assert present(pool) == "ab"
        async with asyncio.timeout(10):
            while present(pool) != "b":  # noqa: ASYNC110 - a task of the pool's own
                await asyncio.sleep(0.001)

    run(scenario)


def test_idle_models_are_unloaded_after_keep_alive_and_used_ones_are_not() -> None:
    async def scenario(setup: Setup) -> None:
        pool = setup.pool(keep_alive_seconds=60)
        await use(pool, "a")
        lease = await pool.lease("b")
        setup.clock.now += 59
        await pool.unload_idle()
        assert present(pool) == "ab"
        setup.clock.now += 2
        await pool.unload_idle()
        assert present(pool) == "b"
        lease.end()
        await pool.unload_idle()
        assert present(pool) == "b", "idle since a moment ago"
        setup.clock.now += 61
        await pool.unload_idle()
        assert present(pool) == ""

    run(scenario)


def test_a_model_may_be_kept_for_a_time_of_its_own() -> None:
    async def scenario(setup: Setup) -> None:
        pool = setup.pool(keep_alive_seconds=60, own_keep_alive={"a": 10, "b": 0})
        for name in "ab":
            await use(pool, name)
        setup.clock.now += 11
        await pool.unload_idle()
        assert present(pool) == "b"
        setup.clock.now += 100_000
        await pool.unload_idle()
        assert present(pool) == "b"

    run(scenario)


def test_a_pinned_model_stays_when_it_is_idle_and_when_others_need_its_memory() -> None:
    async def scenario(setup: Setup) -> None:
        pool = setup.pool(memory_bytes=2 * GIB, keep_alive_seconds=60, pinned="a")
        for name in "abc":
            await use(pool, name)
        assert present(pool) == "ac"
        setup.clock.now += 61
        await pool.unload_idle()
        assert present(pool) == "a"

    run(scenario)


def test_a_request_can_say_how_long_its_model_is_kept() -> None:
    async def scenario(setup: Setup) -> None:
        pool = setup.pool(keep_alive_seconds=60)
        pool.start()
        pool.keep_alive("a", math.inf)
        await use(pool, "a")
        assert pool.find("a").seconds_left == math.inf
        setup.clock.now += 1000
        await pool.unload_idle()
        assert present(pool) == "a"
        pool.keep_alive("a", 0)
        assert present(pool) == "a", "it is unloaded after its next use"
        with await pool.lease("a"):
            assert pool.find("a").seconds_left == 0
        await until(lambda: present(pool) == "")
        await use(pool, "a")
        assert 59 < pool.find("a").seconds_left <= 60, "the next load is kept as the server is set"

    run(scenario)


def test_a_model_without_a_limit_can_still_be_given_one() -> None:
    async def scenario(setup: Setup) -> None:
        pool = setup.pool(keep_alive_seconds=0)
        pool.start()
        await use(pool, "a")
        assert pool.find("a").seconds_left == math.inf
        pool.keep_alive("a", 5)
        await use(pool, "a")
        setup.clock.now += 6
        await use(pool, "b")  # the watch looks again
        await until(lambda: present(pool) == "b")

    run(scenario)


def test_the_tag_of_ollama_names_the_same_model() -> None:
    async def scenario(setup: Setup) -> None:
        pool = setup.pool("a", "b:latest", "c")
        assert await use(pool, "a:latest") == "a"
        assert await use(pool, "b:latest") == "b:latest"
        with pytest.raises(UnknownModel):
            await use(pool, "a:7b")

    run(scenario)


def test_a_failed_load_fails_all_waiting_requests_and_is_retried() -> None:
    async def scenario(setup: Setup) -> None:
        pool = setup.pool()
        setup.loader.fault = StartupError("The file is torn.")
        outcomes = await asyncio.gather(*(use(pool, "a") for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in outcomes] == [ModelLoadFailed] * 3
        assert "The file is torn." in str(outcomes[0])
        setup.loader.fault = OSError("a bug")
        with pytest.raises(ModelLoadFailed, match="The log has the details"):
            await use(pool, "a")
        setup.loader.fault = None
        assert await use(pool, "a") == "a"
        assert setup.loader.loads == ["a"] * 3

    run(scenario)


@pytest.mark.parametrize(
    ("names", "default", "used", "asked", "answers"),
    [
        (("only",), "only", (), "gpt-4o", "only"),
        (("only",), None, (), None, "only"),
        (("a", "b"), "b", ("a",), None, "b"),
        (("a", "b"), None, (), None, "a"),
        (("a", "b"), None, ("b",), None, "b"),
        (("a", "b"), None, ("b",), "", "b"),
    ],
)
def test_which_model_answers(
    names: tuple[str, ...],
    default: str | None,
    used: tuple[str, ...],
    asked: str | None,
    answers: str,
) -> None:
    async def scenario(setup: Setup) -> None:
        pool = setup.pool(*names, default=default)
        for name in used:
            await use(pool, name)
        assert await use(pool, asked) == answers

    run(scenario)


def test_an_unknown_name_among_several_is_refused_with_those_there_are() -> None:
    async def scenario(setup: Setup) -> None:
        pool = setup.pool()
        for refused in (pool.lease("gpt-4o"), pool.load("gpt-4o"), pool.unload("gpt-4o")):
            with pytest.raises(
                UnknownModel, match=r"`gpt-4o` is not served here\. Available: `a`, `b`"
            ):
                await refused

    run(scenario)


def test_load_and_unload_may_be_repeated() -> None:
    async def scenario(setup: Setup) -> None:
        pool = setup.pool()
        await pool.unload("a")
        for _ in range(2):
            await pool.load("a")
        assert setup.loader.loads == ["a"]
        for _ in range(2):
            await pool.unload("a")
        assert setup.loader.models[0].is_closed
        assert pool.find("a").card is None

    run(scenario)


def test_a_load_ends_when_the_server_does() -> None:
    async def scenario(setup: Setup) -> None:
        setup.loader.may_go_on.clear()
        pool = setup.pool()
        waiting = asyncio.create_task(use(pool, "a"))
        await began(setup.loader)
        await pool.shut_down(0)
        setup.loader.may_go_on.set()
        with pytest.raises(ShuttingDown):
            await waiting
        with pytest.raises(ShuttingDown):
            await use(pool, "b")

    run(scenario)


def test_totals_add_up_and_what_was_counted_stays_counted() -> None:
    def cache(n_prefilled: int, n_bytes: int) -> CacheStatus:
        tiers = [
            TierStatus(name=name, n_entries=1, n_bytes=n_bytes, budget_bytes=100)
            for name in (CacheSource.MEMORY, CacheSource.DISK)
        ]
        counters = CacheCounters(prefilled_tokens=n_prefilled)
        return CacheStatus(
            model_class="dense", off_because=None, tiers=tuple(tiers), counters=counters
        )

    def of(cache: CacheStatus) -> EngineStatus:
        return replace(FakeResponder().status(), cache=cache)

    both = total([of(cache(5, 70)), of(cache(7, 80))], CacheCounters(), {})
    assert both.cache is not None
    assert (both.n_slots, both.cache.counters.prefilled_tokens) == (8, 12)
    memory, disk = both.cache.tiers
    assert (memory.n_entries, memory.n_bytes, memory.budget_bytes) == (2, 150, 200)
    assert (disk.n_entries, disk.n_bytes, disk.budget_bytes) == (2, 80, 100)

    past = CacheCounters() + cache(7, 80).counters
    one = total([of(cache(5, 70))], past, {})
    assert one.cache is not None
    assert one.cache.counters == both.cache.counters
    none = total([], past + cache(5, 70).counters, {})
    assert none.cache is not None
    assert (none.n_slots, none.cache.counters) == (0, both.cache.counters)
    assert total([], CacheCounters(), {}).cache is None
