"""Stored responses: in memory, on disk, across restarts, and when the disk fails."""

import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from rekindle.cache.disk.catalogue import Catalog
from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.responses import file as response_file
from rekindle.cache.responses import store as response_store
from rekindle.cache.responses.file import LIFE_SECONDS, RESPONSES
from rekindle.cache.responses.store import MemoryResponses, ResponseDatabase
from rekindle.cache.tools.directory import clear
from rekindle.errors import TierFailed
from rekindle.generation.forgetting import Tombstones
from rekindle.generation.request import USUAL_TERMS
from rekindle.generation.stored_responses import ResponseStore, StoredResponse

FILE_NAME = RESPONSES.file_name
NOW = int(time.time())


def response(n: int, data: bytes = b"data", *, created_at: int = NOW) -> StoredResponse:
    return StoredResponse(f"resp_{n}", created_at, data, USUAL_TERMS.owner)


@contextmanager
def opened(directory: Path, **bounds: int) -> Iterator[ResponseDatabase]:
    with closing(ResponseDatabase(directory, forgotten=Tombstones(), **bounds)) as store:
        yield store


def ids_on_disk(directory: Path) -> list[bytes]:
    with closing(sqlite3.connect(directory / FILE_NAME)) as connection:
        return sorted(id for (id,) in connection.execute("SELECT id FROM responses"))


def test_a_delete_while_a_response_is_read_is_not_undone_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        store.put(response(1))
    with opened(tmp_path) as store, ThreadPoolExecutor() as threads:
        read = response_file.ResponseFile.read

        def read_slowly(file: response_file.ResponseFile, id: str) -> StoredResponse | None:
            found = read(file, id)
            deletions.append(threads.submit(store.delete, id))
            wait(deletions, timeout=0.2)
            return found

        deletions: list[Future[bool]] = []
        with monkeypatch.context() as slow:
            slow.setattr(response_file.ResponseFile, "read", read_slowly)
            store.get("resp_1")
        assert deletions[0].result()
        assert store.get("resp_1") is None


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ResponseStore]:
    made: ResponseStore = MemoryResponses(Tombstones())
    if request.param == "disk":
        made = ResponseDatabase(tmp_path, forgotten=Tombstones())
    with closing(made):
        yield made


def test_what_was_put_is_found_until_it_is_deleted(store: ResponseStore) -> None:
    store.put(response(1))
    store.put(response(2))
    assert store.get("resp_1") == response(1)
    assert store.delete("resp_1")
    assert store.get("resp_1") is None
    assert not store.delete("resp_1")
    assert store.get("resp_2") == response(2)
    assert store.get("resp_\ud800") is None


def test_ids_are_listed_by_their_beginning_written_or_not(tmp_path: Path) -> None:
    def put(store: ResponseStore, *ids: str) -> None:
        for id in ids:
            store.put(StoredResponse(id, NOW, b"data", USUAL_TERMS.owner))

    memory = MemoryResponses(Tombstones())
    put(memory, "a/2", "a/1", "b/1", "a", "ab/1")
    assert memory.ids("a/") == ["a/1", "a/2"]
    with opened(tmp_path) as store:
        assert store.ids("a/") == []
        put(store, "a/2", "b/1", "a/\u1234", "a0")
    with opened(tmp_path) as store:
        put(store, "a/1", "ab/1")
        assert store.ids("a/") == ["a/1", "a/2", "a/\u1234"]
        store.delete("a/2")
        assert store.ids("a/") == ["a/1", "a/\u1234"]


def test_what_is_thirty_days_old_is_gone(store: ResponseStore) -> None:
    store.put(response(1, created_at=NOW - LIFE_SECONDS - 1))
    store.put(response(2, created_at=NOW - LIFE_SECONDS + 3600))
    assert store.get("resp_1") is None
    assert store.get("resp_2") is not None


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    store = MemoryResponses(Tombstones(), max_responses=2)
    store.put(response(1))
    store.put(response(2))
    store.get("resp_1")
    store.put(response(3))
    assert [store.get(f"resp_{n}") is not None for n in (1, 2, 3)] == [True, False, True]
    store = MemoryResponses(Tombstones(), max_bytes=10)
    store.put(response(1, bytes(8)))
    store.put(response(2, bytes(8)))
    store.put(response(3, bytes(11)))
    assert [store.get(f"resp_{n}") is not None for n in (1, 2, 3)] == [False, True, False]


def test_a_restart_finds_everything_and_only_the_owner_may_read_it(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        store.put(response(1, b"first" * 1000))
    with opened(tmp_path / "cache") as store:
        assert store.get("resp_1") == response(1, b"first" * 1000)
        assert store.delete("resp_1")
    with opened(tmp_path / "cache") as store:
        assert store.get("resp_1") is None
    assert stat.S_IMODE((tmp_path / "cache" / FILE_NAME).stat().st_mode) == 0o600


def test_two_servers_share_what_they_store(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as other:
        one.put(response(1))
        eventually(lambda: other.get("resp_1") == response(1))
        other.delete("resp_1")
        assert ids_on_disk(tmp_path) == []


def test_the_disk_is_bounded_by_use(tmp_path: Path) -> None:
    with opened(tmp_path, max_responses=3) as store:
        for n in range(3):
            store.put(response(n))
            eventually(lambda n=n: f"resp_{n}".encode() in ids_on_disk(tmp_path))  # type: ignore[misc]
    with opened(tmp_path, max_responses=3) as store:
        store.get("resp_0")
        store.put(response(3))
    assert ids_on_disk(tmp_path) == [b"resp_0", b"resp_2", b"resp_3"]
    with opened(tmp_path, max_bytes=1500) as store:
        store.put(response(4, os.urandom(1000)))
    assert ids_on_disk(tmp_path) == [b"resp_3", b"resp_4"]


@pytest.mark.parametrize("damage", [b"not a database" * 1000, b"SQLite format 3\0" + bytes(5000)])
def test_a_damaged_file_costs_its_responses_and_nothing_else(
    tmp_path: Path, damage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "RETRY_SECONDS", 0.01)
    with opened(tmp_path) as store:
        store.put(response(1))
    (tmp_path / FILE_NAME).write_bytes(damage)
    with opened(tmp_path) as store:
        assert store.get("resp_1") is None
        store.put(response(2))
        assert store.get("resp_2") == response(2)
    assert ids_on_disk(tmp_path) == [b"resp_2"]
    assert [path.name.endswith(FILE_NAME) for path in (tmp_path / "quarantine").iterdir()] == [True]


def test_a_damaged_row_is_not_there(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.put(response(1))
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection, connection:
        connection.execute("UPDATE responses SET data = x'00'")
    with opened(tmp_path) as store:
        assert store.get("resp_1") is None


def test_a_file_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.put(response(1))
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.execute("PRAGMA user_version = 99")
    before = (tmp_path / FILE_NAME).read_bytes()
    with opened(tmp_path) as store:
        store.put(response(2))
        assert store.get("resp_2") == response(2)
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_a_directory_that_cannot_be_written_costs_only_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    with opened(tmp_path / "cache") as store:
        store.put(response(1))
        assert store.get("resp_1") == response(1)
        eventually(lambda: "continuing in memory" in caplog.text)
        with pytest.raises(TierFailed):
            store.delete("resp_1")
        assert store.get("resp_1") is None
    assert caplog.text.count("responses: storage failing, continuing in memory") == 1


def test_clearing_the_cache_clears_the_responses(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path)) as catalog:
        catalog.open(EntryFiles(tmp_path).set_aside)
    with opened(tmp_path) as store:
        store.put(response(1))
    clear(tmp_path)
    assert not (tmp_path / FILE_NAME).exists()
    with opened(tmp_path) as store:
        store.put(response(2))
    assert ids_on_disk(tmp_path) == [b"resp_2"]


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            if holds():
                return
        except sqlite3.OperationalError:
            pass  # there is no table yet
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_response_that_unpacks_to_gigabytes_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_file, "MAX_RESPONSE_BYTES", 2**20)
    with opened(tmp_path) as store:
        store.put(response(1, bytes(2**20)))
        store.put(response(2, bytes(2**20 + 1)))
    with opened(tmp_path) as store:
        assert store.get("resp_1") is not None
        assert store.get("resp_2") is None


def test_a_file_with_names_that_are_not_utf8_is_damaged(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.put(response(1))
    path = tmp_path / FILE_NAME
    # sqlite3 decodes the name for the message about the index that it cannot parse.
    data = path.read_bytes().replace(b"by_ageresponses", b"\xefy_ageresponses")
    path.write_bytes(data.replace(b"CREATE INDEX by_age", b"CREATE INDEX (((((("))
    with opened(tmp_path) as store:
        with suppress(TierFailed):
            assert store.get("resp_1") is None
        store.put(response(2))
    assert ids_on_disk(tmp_path) == [b"resp_2"]
