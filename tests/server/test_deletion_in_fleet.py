"""A deletion on one server of a shared store holds on all of them, and for no other session."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import redis

from tests.conftest import TinyModels
from tests.support.deleted_texts import (
    Forms,
    Person,
    forms_of,
    left_in_files,
    left_in_routes,
    left_in_store,
    secret_word,
)
from tests.support.fleet import eventually
from tests.support.redis_server import redis_server
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture
from tests.support.workloads import assistant, system, user

SYSTEM = system("a prompt that all sessions share", 300)
N_BOBS = 4  # a busy machine may answer one of them too late
N_SHARED = 512  # tokens of the system prompt in whole blocks


class TwoServers(NamedTuple):
    one: ServerProcess
    other: ServerProcess
    store: redis.Redis
    directories: tuple[Path, Path]


@pytest.fixture
def servers(tiny_models: TinyModels, tmp_path: Path) -> Iterator[TwoServers]:
    """Two servers with a directory each and one store."""
    model = str(tiny_models(TinyArchitecture.LLAMA))
    with ExitStack() as stack:
        shared = stack.enter_context(redis_server(tmp_path))
        engine = ("--parallel", "2", "--ctx-size", "8192", "--threads", "1")
        options = (model, *engine, "--cache-shared", shared.url, "--no-cache-recompute")
        directories = (tmp_path / "one", tmp_path / "other")
        one, other = (
            stack.enter_context(serve(*options, "--cache-dir", str(each))) for each in directories
        )
        yield TwoServers(one, other, stack.enter_context(shared.client()), directories)


def ask(server: ServerProcess, person: Person) -> dict[str, int]:
    """Send one turn more of a conversation. Return how many tokens each tier had."""
    history = person.history
    # Several times: a block may end within a word.
    asked = [*history, user(f"{len(history)} The secret is {person.word}, ok? " * 5)]
    body = {"messages": [SYSTEM, *asked], "temperature": 0, "max_tokens": 8}
    url = f"{server.url}/v1/chat/completions"
    reply = httpx.post(url, json=body, headers=person.headers, timeout=120)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    person.history = [*asked, assistant(answer["choices"][0]["message"]["content"])]
    return {each["tier"]: each["tokens"] for each in answer["rekindle"]["cached"]}


def found_in_store(server: ServerProcess, noise: random.Random) -> int:
    """Return how many tokens of a new conversation the store had.

    A busy machine may answer too late, and then the server computes: such a conversation is
    deleted, and another one asks.
    """
    for _ in range(5):
        person = Person("", f"cat-{secret_word(noise)}", secret_word(noise))
        n_shared = ask(server, person).get("shared", 0)
        if n_shared >= N_SHARED:
            return n_shared
        params = {"session": person.session}
        httpx.delete(f"{server.url}/v1/cache", params=params, timeout=60).raise_for_status()
    return 0


def left(servers: TwoServers, person: Person, forms: Forms) -> list[str]:
    found = left_in_store(servers.store, forms)
    for server, directory in zip((servers.one, servers.other), servers.directories, strict=True):
        found += left_in_files(directory, forms)
        found += left_in_routes(server.url, person, forms)
    return found


def test_a_deleted_session_is_gone_everywhere_and_the_prompt_of_others_still_hits(
    servers: TwoServers,
) -> None:
    noise = random.Random(3)
    ann, *bobs = (
        Person("", f"{name}-{secret_word(noise)}", secret_word(noise))
        for name in ("ann", *["bob"] * N_BOBS)
    )
    forms = {each.word: forms_of(servers.one.url, each.word) for each in (ann, *bobs)}
    for person in (ann, *bobs):  # Ann stores the system prompt
        for server in (servers.one, servers.other) if person is ann else (servers.other,):
            ask(server, person)
            eventually(
                lambda: left_in_store(servers.store, forms[person.word]) != [],  # noqa: B023
                "the store does not get what was computed",
            )
    assert len(left(servers, ann, forms[ann.word])) >= 5  # in the store and on both servers
    reply = httpx.delete(
        f"{servers.one.url}/v1/cache",
        params={"session": ann.session},
        headers=ann.headers,
        timeout=60,
    )
    assert reply.status_code == 200, reply.text
    assert reply.json()["unreached"] == []
    assert reply.json()["places"]["shared"] > 0
    eventually(lambda: left(servers, ann, forms[ann.word]) == [], "something is left")
    # The server of the deletion knew the system prompt as Ann's.
    assert found_in_store(servers.one, noise) >= N_SHARED
    assert any(sum(ask(servers.one, bob).values()) > N_SHARED + 50 for bob in bobs)
    assert all(left_in_store(servers.store, forms[bob.word]) for bob in bobs)
    # The same text in a later request is new.
    ann.history.clear()
    assert sum(ask(servers.other, ann).values()) < N_SHARED + 256
    assert left(servers, ann, forms[ann.word])
