"""Servers with one shared store behind a balancer: any of them can continue a conversation."""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from tests.campaigns.fleet import run
from tests.support.fleet import BY_SESSION, IN_TURN, Fleet, eventually, running_fleet
from tests.support.redis_server import redis_server
from tests.support.s3_server import s3_server
from tests.support.tiny_models import TinyArchitecture
from tests.support.workloads import Message, assistant, prose, system, user

MAX_AMPLIFICATION = 1.05
N_TURNS = 8
N_SESSIONS = 6  # of which one owner is killed: a lookup that takes too long is given up


class Store(Protocol):
    def kill(self) -> None: ...

    def start(self) -> None: ...


class Shared(NamedTuple):
    url: str
    environment: dict[str, str]
    store: Store


@pytest.fixture(scope="module", params=["redis", pytest.param("s3", marks=pytest.mark.long)])
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("store")
    if request.param == "redis":
        with redis_server(folder) as redis:
            yield Shared(redis.url, {}, redis)
    else:
        with s3_server(folder) as s3:
            yield Shared(s3.url, s3.environment, s3)


@contextmanager
def fleet_of(shared: Shared, folder: Path, *, balance: str) -> Iterator[Fleet]:
    with running_fleet(
        folder, "--cache-shared", shared.url, balance=balance, environment=shared.environment
    ) as fleet:
        yield fleet


@pytest.mark.long
def test_a_conversation_moving_between_servers_is_computed_once_and_survives_its_store(
    shared: Shared, embedded_model: Path, tmp_path: Path
) -> None:
    """Eight turns, each at another server; then the store is killed and comes back."""
    with fleet_of(shared, tmp_path, balance=IN_TURN) as fleet:
        history: list[Message] = [system("a traveller", 200), user(prose("hop", 30))]
        visited = []
        for turn in range(N_TURNS):
            reply = fleet.chat(history, max_tokens=12)
            visited.append(reply.server)
            history += [assistant(reply.answer.text), user(prose(f"turn {turn}", 20))]
            fleet.wait_until_told(reply.server)
        assert all(one != other for one, other in itertools.pairwise(visited))
        assert fleet.amplification <= MAX_AMPLIFICATION

        shared.store.kill()
        for _ in range(2 * len(fleet.servers)):  # nobody is refused, and each has its own tiers
            assert fleet.chat(history, max_tokens=4).answer.text
        repeated = fleet.chat(history, max_tokens=4)
        assert repeated.answer.n_prefilled <= 64
        eventually(lambda: health_of(fleet) == {"not answering"}, "nobody notices")

        shared.store.start()
        eventually(lambda: health_of(fleet) == {"ok"}, "nobody notices that it is back")
        # A lookup that takes too long is given up, so one conversation alone would prove nothing.
        attempts = itertools.count()
        eventually(lambda: finds_shared(fleet, f"try {next(attempts)}"), "it is not used again")


def test_after_the_owner_of_a_session_is_killed_the_next_turn_hits_on_another_server(
    shared: Shared, embedded_model: Path, tmp_path: Path
) -> None:
    with fleet_of(shared, tmp_path, balance=BY_SESSION) as fleet:
        histories: dict[str, list[Message]] = {}
        owner_of: dict[str, str] = {}
        for session in (f"mine {n}" for n in range(N_SESSIONS)):
            history = [system(f"orphan {session}", 200), user(prose(f"owner {session}", 30))]
            owners = set()
            for turn in range(2):
                reply = fleet.chat(history, session=session, max_tokens=12)
                owners.add(reply.server)
                history += [assistant(reply.answer.text), user(prose(f"turn {turn}", 20))]
            histories[session] = history
            [owner_of[session]] = owners
        [(owner, _)] = Counter(owner_of.values()).most_common(1)
        fleet.wait_until_told(owner)
        fleet.kill(owner)
        are_found = []
        for session in (each for each in histories if owner_of[each] == owner):
            n_before = fleet.n_prefilled - fleet.n_floor
            reply = fleet.chat(histories[session], session=session, max_tokens=4)
            assert reply.server != owner
            n_again = fleet.n_prefilled - fleet.n_floor - n_before
            n_allowed = (MAX_AMPLIFICATION - 1) * len(reply.answer.prompt)
            are_found.append("shared" in reply.answer.sources and n_again <= n_allowed)
        assert any(are_found)


def finds_shared(fleet: Fleet, topic: str) -> bool:
    """Whether the second turn of a new conversation, at another server, finds the first one."""
    history: list[Message] = [system(topic, 150), user(prose(topic, 30))]
    first = fleet.chat(history, max_tokens=4)
    fleet.wait_until_told(first.server)
    history += [assistant(first.answer.text), user(prose("and again", 20))]
    second = fleet.chat(history, max_tokens=4)
    assert second.server != first.server
    return "shared" in second.answer.sources and (
        second.answer.n_cached >= len(first.answer.prompt)
    )


def health_of(fleet: Fleet) -> set[str]:
    return {client.get("/health")["shared_store"] for client in fleet.clients.values()}


@pytest.mark.long
def test_a_frozen_store_delays_no_request(embedded_model: Path, tmp_path: Path) -> None:
    """The store stays connected but never answers; requests use local prefixes."""
    with (
        redis_server(tmp_path) as redis,
        running_fleet(tmp_path, "--cache-shared", redis.url, balance=IN_TURN) as fleet,
    ):
        redis.freeze()
        try:
            for n in range(4):
                assert fleet.chat([user(prose(f"frozen {n}", 100))], max_tokens=2).answer.text
        finally:
            redis.thaw()
        eventually(lambda: health_of(fleet) == {"ok"}, "it is not used again")


def test_every_answer_of_a_fleet_equals_the_cold_answer(tmp_path: Path) -> None:
    """A few of what `python -m tests.campaigns.fleet` does with 500 conversations."""
    ledger = run(
        TinyArchitecture.QWEN35, n_conversations=12, seed=7, trouble_seconds=3.0, folder=tmp_path
    )
    assert ledger.wrong == []
