"""Objects in a real S3-compatible server."""

import threading
import time
from collections.abc import Iterator

import pytest

from rekindle.cache.shared import health as store_health
from rekindle.cache.shared.connection import open_shared_store
from rekindle.cache.shared.s3_objects import ANSWER_SECONDS, S3Objects
from rekindle.errors import StartupError, StoreUnreachable, TierFailed
from tests.support.s3_server import S3Server, s3_server

MIB = 1024**2
MANY = 64 * MIB


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def objects(
    server: S3Server, environment: None, request: pytest.FixtureRequest
) -> Iterator[S3Objects]:
    objects = S3Objects(f"{server.url}/{request.node.name}")
    yield objects
    objects.close()


def test_what_was_written_is_read(objects: S3Objects) -> None:
    objects.write("e/1", [b"head", memoryview(b"payload")])
    objects.write("e/2", [memoryview(b"alone")])
    assert objects.read(["e/1", "e/0", "e/2"], max_bytes=MANY) == [b"headpayload", None, b"alone"]
    assert objects.read(["e/2"], max_bytes=MANY) == [b"alone"]
    assert objects.read([], max_bytes=MANY) == []


def test_the_first_bytes_of_a_short_object_are_all_of_it(objects: S3Objects) -> None:
    objects.write("e/1", [b"four"])
    assert objects.read(["e/1", "e/0"], max_bytes=2) == [b"fo", None]
    assert objects.read(["e/1", "e/0"], max_bytes=100) == [b"four", None]


def test_an_empty_object_reads_as_empty(objects: S3Objects) -> None:
    """Nobody writes one but a hostile writer. It must not pass for a failure of the store."""
    objects.write("e/1", [b""])
    assert objects.read(["e/1", "e/0"], max_bytes=100) == [b"", None]


def test_writing_again_replaces(objects: S3Objects) -> None:
    objects.write("e/1", [b"a longer one"])
    objects.write("e/1", [b"short"])
    assert objects.read(["e/1"], max_bytes=MANY) == [b"short"]


def test_an_object_of_many_megabytes_comes_back_whole(objects: S3Objects) -> None:
    payload = bytes(range(256)) * (12 * MIB // 256)
    objects.write("e/1", [b"head", memoryview(payload)])
    assert objects.read(["e/1"], max_bytes=MANY) == [b"head" + payload]


def test_a_read_of_many_names_keeps_their_order(objects: S3Objects) -> None:
    for number in range(0, 40, 2):
        objects.write(f"e/{number}", [str(number).encode()])
    found = objects.read([f"e/{number}" for number in range(40)], max_bytes=8)
    assert found == [str(number).encode() if number % 2 == 0 else None for number in range(40)]


def test_members_of_groups_are_found_up_to_a_limit(objects: S3Objects) -> None:
    for number in range(5):
        objects.add("c/a", f"row.{number}")
    objects.add("c/a", "row.0")
    objects.add("c/ab", "row.9")
    found, none = objects.members(["c/a", "c/none"], limit=64)
    assert sorted(found) == [f"row.{number}" for number in range(5)]
    assert none == []
    [few] = objects.members(["c/a"], limit=2)
    assert len(set(few)) == 2


def test_a_touch_says_what_is_there(objects: S3Objects) -> None:
    objects.write("e/1", [b"bytes"])
    assert objects.touch(["e/1", "e/2"]) == [True, False]
    assert objects.touch([]) == []


def test_what_was_removed_is_not_there(objects: S3Objects) -> None:
    objects.write("e/1", [b"bytes"])
    objects.write("e/2", [b"bytes"])
    objects.remove(["e/1", "e/3"])
    objects.remove([])
    assert objects.read(["e/1", "e/2"], max_bytes=MANY) == [None, b"bytes"]


def test_prefixes_keep_servers_apart(server: S3Server, objects: S3Objects) -> None:
    objects.write("e/1", [b"bytes"])
    other = S3Objects(f"{server.url}-of-others")
    assert other.read(["e/1"], max_bytes=MANY) == [None]
    other.close()
    assert objects.reads_are_dear
    assert objects.place.startswith(server.url)


@pytest.mark.usefixtures("environment")
def test_a_bucket_that_is_not_there_is_a_failure_and_no_miss() -> None:
    objects = S3Objects("s3://no-such-bucket/prefix")
    with pytest.raises(TierFailed):
        objects.ping()
    with pytest.raises(TierFailed):
        objects.read(["e/1"], max_bytes=MANY)
    objects.close()


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///prefix", "s3://me:secret@bucket", "s3://bucket?a=b"]
)
def test_an_address_that_cannot_be_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(StartupError, match="s3://bucket/prefix") as refused:
        S3Objects(url)
    assert "secret" not in refused.value.message


def test_a_server_that_hangs_is_given_up(server: S3Server, objects: S3Objects) -> None:
    objects.write("e/1", [b"bytes"])
    server.freeze()
    try:
        began_at = time.monotonic()
        with pytest.raises(TierFailed) as gave_up:
            objects.touch(["e/1"])
        assert time.monotonic() - began_at < 10 * ANSWER_SECONDS  # not for ever
        assert not isinstance(gave_up.value, StoreUnreachable)
    finally:
        server.thaw()
    assert objects.read(["e/1"], max_bytes=MANY) == [b"bytes"]


@pytest.mark.usefixtures("environment")
def test_a_server_that_was_killed_is_used_again_when_it_is_back(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_health, "MIN_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(store_health, "MAX_WAIT_SECONDS", 0.05)
    store = open_shared_store(f"{server.url}/killed", None)
    store.write("e/1", [b"bytes"])
    back = threading.Event()
    server.kill()
    with pytest.raises(StoreUnreachable, match="refused"):
        store.read(["e/1"], max_bytes=MANY)
    assert not store.health.is_well
    store.health.on_change(back.set)
    server.start()
    assert back.wait(60)
    store.write("e/1", [b"bytes"])
    assert store.read(["e/1"], max_bytes=MANY) == [b"bytes"]
    store.close()
