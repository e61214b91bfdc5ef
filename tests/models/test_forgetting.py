"""The coordinator of deletions: every place is asked, failures are reported and retried."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from rekindle.cache.entry import Retention, namespace_root
from rekindle.cache.forgetting.tombstone_file import TombstoneFile
from rekindle.cache.shared.connection import SharedStore
from rekindle.cache.tools.forgetting import forget_everything
from rekindle.errors import EngineDied, EngineFailed, TierFailed
from rekindle.generation.forgetting import Deleted, Place, Scope, Tombstone, Tombstones
from rekindle.generation.questions import Forget
from rekindle.models import forgetting as coordinator
from rekindle.models.forgetting import Forgetting, Records
from rekindle.models.pool import ModelPool
from rekindle.models.serving_model import ServingModel
from tests.api.fakes import CARD
from tests.cache.entries import OTHER_MODEL, make_entry, open_tier

SCOPE = Scope(namespace="one")
NOW = time.time()
TOMBSTONE = Tombstone(scope=SCOPE, at=NOW)


class Model:
    """A loaded model whose engine and responder note the deletions that reach them."""

    def __init__(self) -> None:
        self.asked: list[Tombstone] = []
        self.forgot: list[Tombstone] = []
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.serving = ServingModel(
            CARD, cast(Any, self), cast(Any, self), n_bytes=lambda: 0, close=lambda: None
        )

    async def ask(self, question: Forget) -> Deleted:
        self.asked.append(question.tombstone)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return Deleted(counts={Place.LIVE: 2})

    def forget(self, tombstone: Tombstone) -> None:
        self.forgot.append(tombstone)


class Pool:
    def __init__(self, *models: Model) -> None:
        self.models = list(models)
        self.on_loaded: Callable[[ServingModel, float], None] = lambda loaded, began: None

    def serving(self) -> list[ServingModel]:
        return [model.serving for model in self.models]


class Server:
    def __init__(
        self, directory: Path | None, *models: Model, shared: SharedStore | None = None
    ) -> None:
        self.pool = Pool(*models)
        self.forgotten = Tombstones()
        self.turns: list[Tombstone] = []
        self.error: Exception | None = None
        records = (Records(Place.TURNS, self._delete, blocks=True),)
        self.forgetting = Forgetting(
            cast(ModelPool, self.pool), self.forgotten, records, directory=directory, shared=shared
        )

    def _delete(self, tombstone: Tombstone) -> int:
        assert (
            tombstone in self.forgotten.all()
        )  # late writes are refused before anything is deleted
        self.turns.append(tombstone)
        if self.error is not None:
            raise self.error
        return 3


def store(directory: Path, *sessions: str) -> None:
    """Store an entry for each session, of a model that no server has loaded."""
    tier = open_tier(directory, model=OTHER_MODEL)
    root = namespace_root(OTHER_MODEL, "")
    for number, session in enumerate(sessions):
        retention = Retention(session=session, asked_at=NOW - 60)
        tier.put(replace(make_entry(number, model=OTHER_MODEL), retention=retention, root=root))
    tier.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(bounded())


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(2000):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not happen")


def test_every_place_is_asked_and_its_counts_are_added_up() -> None:
    async def scenario() -> None:
        models = Model(), Model()
        server = Server(None, *models)
        deleted = await server.forgetting.forget(SCOPE, NOW)
        assert deleted == Deleted(counts={Place.LIVE: 4, Place.TURNS: 3})
        assert server.turns == [TOMBSTONE]
        assert [model.asked for model in models] == [[TOMBSTONE]] * 2
        assert [model.forgot for model in models] == [[TOMBSTONE]] * 2

    run(scenario)


def test_what_cannot_be_reached_is_in_the_reply(tmp_path: Path) -> None:
    async def scenario() -> None:
        model = Model()
        model.error = EngineDied("it was killed")
        server = Server(tmp_path / "cache", model)
        server.error = TierFailed("the disk is away")
        deleted = await server.forgetting.forget(SCOPE, NOW)
        assert deleted.counts == {}
        assert [line.partition(":")[0] for line in deleted.unreached] == [
            "turns",
            "The engine of `tiny` does not answer. It deletes its part when it does.",
        ]

    run(scenario)


@pytest.mark.parametrize(
    "error",
    [
        EngineFailed("it dies again and again", retry_after_seconds=1),
        TierFailed("the disk is full"),
        OSError("too many open files"),
    ],
)
def test_a_failure_in_one_place_keeps_no_other_from_deleting(
    tmp_path: Path, error: Exception
) -> None:
    async def scenario() -> None:
        broken, well = Model(), Model()
        broken.error = error
        directory = tmp_path / "cache"
        store(directory, "one", "two")
        server = Server(directory, broken, well)
        deleted = await server.forgetting.forget(Scope(namespace="", session="one"), NOW)
        assert deleted.counts == {Place.LIVE: 2, Place.TURNS: 3, Place.DISK: 1}
        assert deleted.unreached == (
            "The engine of `tiny` does not answer. It deletes its part when it does.",
        )
        broken.error, server.error = None, error
        deleted = await server.forgetting.forget(Scope(namespace="", session="two"), NOW)
        assert deleted.counts == {Place.LIVE: 4, Place.DISK: 1}
        assert len(deleted.unreached) == 1
        server.forgetting.close()

    run(scenario)


@pytest.mark.parametrize("has_directory", [True, False])
def test_an_engine_that_did_not_answer_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_directory: bool
) -> None:
    monkeypatch.setattr(coordinator, "WATCH_SECONDS", 0.01)

    async def scenario() -> None:
        model = Model()
        model.error = EngineDied("it was killed")
        server = Server(tmp_path / "cache" if has_directory else None, model)
        server.forgetting.start()
        await server.forgetting.forget(SCOPE, NOW)
        await until(lambda: len(model.asked) >= 3)
        model.error = None
        n_asked = len(model.asked)
        await until(lambda: len(model.asked) > n_asked)
        await asyncio.sleep(0.1)
        assert len(model.asked) == n_asked + 1

    run(scenario)


def test_a_deletion_of_another_process_is_applied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "WATCH_SECONDS", 0.01)

    async def scenario() -> None:
        model = Model()
        server = Server(tmp_path / "cache", model)
        server.forgetting.start()
        TombstoneFile(tmp_path / "cache").add(TOMBSTONE)
        await until(lambda: bool(model.asked))
        await asyncio.sleep(0.1)
        assert model.asked == model.forgot == server.turns == [TOMBSTONE]

    run(scenario)


def test_a_deletion_that_memory_has_dropped_is_not_applied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr("rekindle.generation.forgetting.MAX_TOMBSTONES", 20)

    async def scenario() -> None:
        server = Server(tmp_path)
        server.forgetting.start()
        file = TombstoneFile(tmp_path)
        made = [Tombstone(scope=Scope(namespace=f"n{n}"), at=NOW + n) for n in range(30)]
        for tombstone in made:
            file.add(tombstone)
            await until(lambda last=tombstone: last in server.turns)  # type: ignore[misc]
        await asyncio.sleep(0.1)
        assert server.turns == made

    run(scenario)


def test_deletions_of_others_are_all_noted_before_the_first_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "WATCH_SECONDS", 0.01)
    tombstones = [
        Tombstone(scope=Scope(namespace="one", session=f"s{n}"), at=NOW) for n in range(9)
    ]

    async def scenario() -> None:
        model = Model()
        model.may_answer.clear()
        server = Server(tmp_path / "cache", model)
        server.forgetting.start()
        for tombstone in tombstones:
            TombstoneFile(tmp_path / "cache").add(tombstone)
        await until(lambda: len(server.forgotten.all()) == len(tombstones))
        assert len(model.asked) <= 1
        model.may_answer.set()
        await until(lambda: len(model.asked) == len(tombstones))
        assert sorted(model.asked, key=lambda each: each.scope.session or "") == tombstones

    run(scenario)


def test_deletions_that_wait_for_one_under_way_use_the_directory_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []

    def counted(directory: Path, groups: Sequence[Sequence[Tombstone]]) -> list[Deleted]:
        passes.append(len(groups))
        return forget_everything(directory, groups)

    monkeypatch.setattr(coordinator, "forget_everything", counted)

    async def scenario() -> None:
        model = Model()
        model.may_answer.clear()
        directory = tmp_path / "cache"
        store(directory, "s0", "s5", "kept")
        server = Server(directory, model)
        scopes = [Scope(namespace="", session=f"s{n}") for n in range(20)]
        work = [asyncio.ensure_future(server.forgetting.forget(each, NOW)) for each in scopes]
        await asyncio.sleep(0)
        work[7].cancel()  # its client has left
        await until(lambda: bool(model.asked) and len(TombstoneFile(directory).all()) == 20)
        await asyncio.sleep(0.1)
        model.may_answer.set()
        deleted = await asyncio.gather(*work[:7], *work[8:])
        assert sum(passes) == 20
        assert len(passes) <= 3
        on_disk = {n: each.counts.get(Place.DISK, 0) for n, each in enumerate(deleted)}
        assert {n for n, count in on_disk.items() if count} == {0, 5}
        assert all(each.counts[Place.LIVE] == 2 for each in deleted)
        await until(lambda: TombstoneFile(directory).unfinished() == [])
        assert len(list(directory.rglob("*.kv"))) == 1

    run(scenario)


class SlowStore:
    """A shared store that does not answer until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def forget(self, tombstone: Tombstone) -> Deleted:
        assert self.released.wait(20)
        return Deleted(counts={Place.SHARED: 1})


def test_deletions_take_no_thread_of_other_requests() -> None:
    async def scenario() -> None:
        shared = SlowStore()
        server = Server(None, shared=cast(SharedStore, shared))
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        work = [
            asyncio.ensure_future(server.forgetting.forget(Scope(namespace=f"{n}"), NOW))
            for n in range(9)
        ]
        await until(lambda: len(server.turns) == 9)
        async with asyncio.timeout(10):
            assert await asyncio.to_thread(lambda: 7) == 7
        assert not any(each.done() for each in work)
        shared.released.set()
        deleted = await asyncio.gather(*work)
        assert all(each.counts == {Place.TURNS: 3, Place.SHARED: 1} for each in deleted)

    run(scenario)


def test_a_model_that_was_being_loaded_hears_of_the_deletions_it_missed() -> None:
    async def scenario() -> None:
        server = Server(None)
        await server.forgetting.forget(Scope(namespace="before"), NOW)
        began = asyncio.get_running_loop().time()
        await server.forgetting.forget(SCOPE, NOW)
        model = Model()
        server.pool.on_loaded(model.serving, began)
        await asyncio.sleep(0)
        assert model.asked == model.forgot == [TOMBSTONE]

    run(scenario)


def test_a_server_knows_the_deletions_from_before_its_start(tmp_path: Path) -> None:
    TombstoneFile(tmp_path / "cache").add(TOMBSTONE)
    server = Server(tmp_path / "cache")
    server.forgetting.restore()
    assert server.forgotten.all() == [TOMBSTONE]


def test_a_deletion_that_a_kill_interrupted_is_completed_after_the_start(tmp_path: Path) -> None:
    """Its model is not loaded. Only the server can delete its entries."""
    directory = tmp_path / "cache"
    store(directory, "gone", "kept")
    interrupted = Tombstone(scope=Scope(namespace="", session="gone"), at=NOW)
    TombstoneFile(directory).add(interrupted)

    async def scenario() -> None:
        server = Server(directory)
        server.forgetting.restore()
        server.forgetting.start()
        await until(lambda: TombstoneFile(directory).unfinished() == [])
        assert TombstoneFile(directory).all() == [interrupted]
        assert len(list(directory.rglob("*.kv"))) == 1

    run(scenario)


def test_a_deletion_that_is_done_is_not_repeated_at_the_next_start(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    forget_everything(directory, [[TOMBSTONE]])

    async def scenario() -> None:
        model = Model()
        server = Server(directory, model)
        server.forgetting.restore()
        server.forgetting.start()
        await asyncio.sleep(0.1)
        assert model.asked == []

    run(scenario)
