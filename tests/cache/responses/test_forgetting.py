"""Deletion of stored responses: in memory, in the queue, in the file, and of late ones."""

import sqlite3
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rekindle.cache.responses.file import RESPONSES
from rekindle.cache.responses.store import MemoryResponses, ResponseDatabase
from rekindle.generation.forgetting import Owner, Scope, Tombstone, Tombstones
from rekindle.generation.stored_responses import ResponseStore, StoredResponse

NOW = int(time.time())
OWNERS = {
    "resp_ann": Owner(namespace="", session="ann", asked_at=10.0),
    "resp_bob": Owner(namespace="", session="bob", asked_at=10.0),
    "one/resp_ann": Owner(namespace="one", session="ann", asked_at=10.0),
    "resp_later": Owner(namespace="", session="ann", asked_at=30.0),
}
OF_ANN = Tombstone(scope=Scope(namespace="", session="ann"), at=20.0)
COMMON = Tombstone(scope=Scope(namespace=""), at=20.0)
ALL = Tombstone(scope=Scope(), at=20.0)
LEFT = {
    OF_ANN: ["resp_bob", "one/resp_ann", "resp_later"],
    COMMON: ["one/resp_ann", "resp_later"],
    ALL: ["resp_later"],
}


def response(id: str) -> StoredResponse:
    return StoredResponse(id, NOW, f"the text of {id}".encode(), OWNERS[id])


def found(store: ResponseStore) -> list[str]:
    return [id for id in OWNERS if store.get(id) is not None]


def texts(directory: Path) -> list[str]:
    with closing(sqlite3.connect(directory / RESPONSES.file_name)) as connection:
        rows = connection.execute("SELECT data FROM responses").fetchall()
    return sorted(zlib.decompress(data).decode() for (data,) in rows)


@pytest.fixture
def forgotten() -> Tombstones:
    return Tombstones()


@pytest.fixture(params=["memory", "disk"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, forgotten: Tombstones
) -> Iterator[ResponseStore]:
    made: ResponseStore = MemoryResponses(forgotten)
    if request.param == "disk":
        made = ResponseDatabase(tmp_path, forgotten=forgotten)
    with closing(made):
        yield made


@pytest.mark.parametrize("tombstone", LEFT)
def test_a_deletion_leaves_other_owners_and_later_requests(
    store: ResponseStore, forgotten: Tombstones, tombstone: Tombstone
) -> None:
    for id in OWNERS:
        store.put(response(id))
    assert found(store) == list(OWNERS)
    forgotten.add(tombstone)
    assert store.forget(tombstone) == len(OWNERS) - len(LEFT[tombstone])
    assert found(store) == LEFT[tombstone]


def test_a_response_that_is_about_to_be_written_again_counts_once(
    store: ResponseStore, forgotten: Tombstones
) -> None:
    for _ in range(20):
        store.put(response("resp_ann"))
        found(store)  # a use, which is written as well
        assert store.forget(COMMON) == 1
    assert found(store) == []


def test_a_response_that_is_put_after_its_deletion_is_not_stored(
    store: ResponseStore, forgotten: Tombstones
) -> None:
    forgotten.add(COMMON)
    store.forget(COMMON)
    for id in OWNERS:
        store.put(response(id))
    assert found(store) == ["one/resp_ann", "resp_later"]


def test_a_deletion_reaches_unwritten_and_written_responses(
    tmp_path: Path, forgotten: Tombstones
) -> None:
    with closing(ResponseDatabase(tmp_path, forgotten=forgotten)) as store:
        for id in OWNERS:
            store.put(response(id))
            if id == "resp_bob":
                assert store._writer.flush(10)
        forgotten.add(COMMON)
        assert store.forget(COMMON) == 2
    assert texts(tmp_path) == ["the text of one/resp_ann", "the text of resp_later"]


V1 = """
PRAGMA auto_vacuum = FULL;
CREATE TABLE responses (
    id BLOB PRIMARY KEY, created_at INTEGER NOT NULL, last_used_at INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE INDEX by_use ON responses (last_used_at, n_bytes);
CREATE INDEX by_age ON responses (created_at);
PRAGMA application_id = 1380667987; PRAGMA user_version = 1;
"""


@pytest.fixture
def of_version_1(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / RESPONSES.file_name)) as old, old:
        old.executescript(V1)
        for id in OWNERS:
            row = (id.encode(), NOW, NOW, 100, zlib.compress(response(id).data))
            old.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?)", row)
    return tmp_path


def test_a_file_of_version_1_keeps_its_responses(of_version_1: Path, forgotten: Tombstones) -> None:
    with closing(ResponseDatabase(of_version_1, forgotten=forgotten)) as store:
        assert found(store) == list(OWNERS)


@pytest.mark.parametrize(
    ("scope", "left"),
    [
        (Scope(namespace="", session="anyone"), ["one/resp_ann"]),
        (Scope(namespace=""), ["one/resp_ann"]),
        (Scope(namespace="one", session="anyone"), ["resp_ann", "resp_bob", "resp_later"]),
        (Scope(namespace="two"), list(OWNERS)),
        (Scope(), []),
    ],
)
def test_responses_of_version_1_are_deleted_with_their_namespace(
    of_version_1: Path, forgotten: Tombstones, scope: Scope, left: list[str]
) -> None:
    tombstone = Tombstone(scope=scope, at=NOW + 1.0)
    with closing(ResponseDatabase(of_version_1, forgotten=forgotten)) as store:
        forgotten.add(tombstone)
        assert store.forget(tombstone) == len(OWNERS) - len(left)
        assert found(store) == left
