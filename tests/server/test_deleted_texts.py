"""After a deletion, nothing of the deleted text is left in a file, a store or a reply."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.campaigns.deletion import DeletionRounds
from tests.conftest import TinyModels
from tests.support.cache_command import cache
from tests.support.deleted_texts import (
    FORGOTTEN,
    Forms,
    Person,
    Talk,
    forms_of,
    left_in_archives,
    left_in_files,
    left_in_routes,
    secret_word,
)
from tests.support.redis_server import redis_server
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture

N_ROUNDS, SEED = 4, 1
# The first person is deleted; each scope also deletes those who stand before its number.
N_DELETED = {"session": 1, "namespace": 2, "all": 3}


@pytest.fixture
def people() -> list[Person]:
    noise = random.Random(7)
    return [
        Person("one", f"ann-{secret_word(noise)}", secret_word(noise)),
        Person("one", f"bob-{secret_word(noise)}", secret_word(noise)),
        Person("", f"cat-{secret_word(noise)}", secret_word(noise)),
    ]


@contextmanager
def serving(model: Path, directory: Path) -> Iterator[ServerProcess]:
    arguments = ("--parallel", "4", "--ctx-size", "8192", "--threads", "1")
    with serve(
        *(str(model), *arguments, "--cache-dir", str(directory), "--shutdown-grace", "0"),
        "--no-cache-recompute",
    ) as server:
        yield server


def tell_everything(url: str, people: list[Person]) -> None:
    for person in people:
        with closing(Talk(url, person)) as talk:
            talk.chat()
            talk.chat()
            talk.call_tool()
            talk.respond()
            talk.respond()
            talk.name_prompt()


def delete(url: str, scope: str, person: Person) -> dict[str, Any]:
    query = {"session": {"session": person.session}, "namespace": {}, "all": {"scope": "all"}}
    reply = httpx.delete(f"{url}/v1/cache", params=query[scope], headers=person.headers, timeout=60)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def wait_until_gone(left: Callable[[], list[str]]) -> None:
    """Wait for the deletion of another process, and for the last write of a running request."""
    deadline = time.monotonic() + 60
    while found := left():
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def assert_gone(server: ServerProcess, directory: Path, person: Person, forms: Forms) -> None:
    assert left_in_files(directory, forms) == []
    assert left_in_routes(server.url, person, forms) == []
    named = Forms(person.session, forms.tokens)
    assert [each for each in left_in_files(directory, named) if FORGOTTEN not in each] == []


def assert_kept(server: ServerProcess, directory: Path, person: Person, forms: Forms) -> None:
    assert left_in_files(directory, forms)
    with closing(Talk(server.url, person)) as talk:
        assert talk.chat() > 100
        for id in person.response_ids:
            assert talk.http.get(f"/v1/responses/{id}").status_code == 200
        assert f"doc-{person.word}" in talk.http.get("/v1/cache?limit=1000").text


@pytest.mark.parametrize("scope", N_DELETED)
def test_a_deletion_leaves_nothing_of_its_scope_and_everything_else(
    tiny_models: TinyModels, tmp_path: Path, people: list[Person], scope: str
) -> None:
    """Also while a reply of the deleted session is streamed, and after a kill."""
    model, directory = tiny_models(TinyArchitecture.LLAMA), tmp_path / "cache"
    deleted, kept = people[: N_DELETED[scope]], people[N_DELETED[scope] :]
    with ExitStack() as stack:
        server = stack.enter_context(serving(model, directory))
        forms = {person.word: forms_of(server.url, person.word) for person in people}
        tell_everything(server.url, people)
        for person in people:
            assert left_in_files(directory, forms[person.word])
            assert left_in_routes(server.url, person, forms[person.word])
        talk = stack.enter_context(closing(Talk(server.url, deleted[0])))
        running = talk.stream(1500)
        next(running)
        body = delete(server.url, scope, deleted[0])
        assert body["unreached"] == []
        assert set(body["places"]) >= {"live", "disk", "turns", "responses", "names", "prompts"}
        for _ in running:
            pass
        server.wait_until_idle()
        for person in deleted:
            wait_until_gone(partial(left_in_files, directory, forms[person.word]))
            assert_gone(server, directory, person, forms[person.word])
            assert left_in_archives(directory, tmp_path, forms[person.word]) == []
        for person in kept:
            assert_kept(server, directory, person, forms[person.word])
        server.kill()
    with serving(model, directory) as server:
        for person in deleted:
            assert_gone(server, directory, person, forms[person.word])
        for person in kept:
            assert_kept(server, directory, person, forms[person.word])
        # A request after the deletion is new: it is computed again, and stored.
        with closing(Talk(server.url, deleted[0])) as talk:
            deleted[0].history.clear()
            assert talk.chat() < 100
            assert talk.chat() > 100


def test_servers_follow_a_deletion_in_their_directory(
    tiny_models: TinyModels, tmp_path: Path, people: list[Person]
) -> None:
    """`rekindle cache forget` writes a tombstone; two servers of the directory apply it."""
    model, directory = tiny_models(TinyArchitecture.LLAMA), tmp_path / "cache"
    with serving(model, directory) as one, serving(model, directory) as other:
        forms = {person.word: forms_of(one.url, person.word) for person in people}
        for server in (one, other):
            tell_everything(server.url, people)
        ann, bob, cat = people
        done = cache("forget", "--namespace", "", "--yes", "--json", directory=directory)
        assert done.code == 0, done.output
        assert done.json["places"]["disk"] > 0  # turns may still wait to be written
        for server in (one, other):
            server.wait_for_log("another process deleted")
            wait_until_gone(partial(left_in_routes, server.url, cat, forms[cat.word]))
        wait_until_gone(partial(left_in_files, directory, forms[cat.word]))
        for server in (one, other):
            for person in (ann, bob):
                assert_kept(server, directory, person, forms[person.word])
        cleared = cache("clear", "--yes", "--json", directory=directory)
        assert cleared.code == 0
        for server in (one, other):
            server.wait_for_log("another process deleted", times=2)
            for person in people:
                wait_until_gone(partial(left_in_routes, server.url, person, forms[person.word]))
        for server in (one, other):
            server.stop()
        for person in people:
            assert left_in_files(directory, forms[person.word]) == []


@pytest.mark.long
@pytest.mark.parametrize("has_store", [False, True])
def test_deletions_in_random_order_with_requests_and_kills_leave_nothing(
    tiny_models: TinyModels, tmp_path: Path, *, has_store: bool
) -> None:
    """Two servers share a directory, and a store. `tests.campaigns.deletion` runs more rounds."""
    model = tiny_models(TinyArchitecture.LLAMA)
    with ExitStack() as stack:
        store, options = None, []
        if has_store:
            redis_store = stack.enter_context(redis_server(tmp_path))
            store = stack.enter_context(redis_store.client())
            options = ["--cache-shared", redis_store.url]
        rounds = stack.enter_context(
            DeletionRounds(model, tmp_path / "cache", SEED, store, *options)
        )
        rounds.run(N_ROUNDS)
