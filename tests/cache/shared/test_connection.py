"""The shared store as the server opens it: guarded, and there or not."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from rekindle.cache.shared import health as store_health
from rekindle.cache.shared import redis_objects
from rekindle.cache.shared.connection import SharedStore, is_on_this_machine, open_shared_store
from rekindle.cache.shared.redis_objects import RedisObjects
from rekindle.cache.shared.sealing import Authenticated, Encrypted, Unsealed
from rekindle.config.cache import CacheSettings
from rekindle.errors import StartupError, StoreUnreachable, TierFailed, TierFull
from rekindle.server.assembly import _open_shared as open_configured
from tests.support.redis_server import RedisServer, redis_server

WAIT_SECONDS = 60
KEY = "07" * 32
MANY = 1000


class BrokenObjects(RedisObjects):
    """Fails before it asks anybody."""

    error: TierFailed | None = None

    def __init__(self) -> None:
        super().__init__("redis://nowhere:1")

    def read(self, names: Sequence[str], *, max_bytes: int) -> list[bytes | None]:
        if self.error:
            raise self.error
        return [b"" for _ in names]


@pytest.fixture
def broken() -> Iterator[tuple[BrokenObjects, SharedStore]]:
    objects = BrokenObjects()
    store = SharedStore(objects, Unsealed())
    yield objects, store
    store.close()


@pytest.fixture
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_health, "MIN_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(store_health, "MAX_WAIT_SECONDS", 0.05)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without a core is not one that fails."""
    monkeypatch.setattr(store_health, "PING_SECONDS", 30)
    monkeypatch.setattr(redis_objects, "CONNECT_SECONDS", 30)
    monkeypatch.setattr(redis_objects, "ANSWER_SECONDS", 30)
    monkeypatch.setattr(redis_objects, "WRITE_SECONDS", 30)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


def change_of(store: SharedStore) -> Callable[[], None]:
    """Waits until the store has failed or come back since."""
    changed = threading.Event()
    store.health.on_change(changed.set)

    def wait() -> None:
        assert changed.wait(WAIT_SECONDS)
        changed.clear()

    return wait


def fail(store: SharedStore, n_times: int = 1) -> None:
    for _ in range(n_times):
        with pytest.raises(TierFailed):
            store.read(["e/1"], max_bytes=MANY)


@pytest.mark.usefixtures("patient")
def test_a_healthy_store_is_used(server: RedisServer) -> None:
    store = open_shared_store(server.url, None)
    store.write("e/1", [b"bytes"])
    store.add("c/1", "member")
    assert store.read(["e/1"], max_bytes=2) == [b"by"]
    assert store.members(["c/1"], limit=1) == [["member"]]
    assert store.touch(["e/1"]) == [True]
    store.remove(["e/1"])
    assert store.read(["e/1"], max_bytes=MANY) == [None]
    assert store.health.is_well
    assert store.place == server.url
    assert not store.reads_are_dear
    store.close()


@pytest.mark.parametrize("encrypts", [True, False])
def test_with_a_key_the_seal_is_a_real_one(server: RedisServer, *, encrypts: bool) -> None:
    store = open_shared_store(server.url, KEY, encrypts=encrypts)
    assert isinstance(store.seal, Encrypted if encrypts else Authenticated)
    store.close()


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("redis://:secret@127.0.0.1:6379/0", True),
        ("redis://localhost", True),
        ("redis://[::1]:6379", True),
        ("unix:///run/redis.sock", True),
        ("redis+cluster://127.0.0.1:1,localhost:2", True),
        ("redis+cluster://127.0.0.1:1,store:2", False),
        ("redis://store:6379", False),
        ("rediss://10.0.0.7", False),
        ("redis://127.0.0.1@store", False),
        ("redis://localhost.evil.example", False),
        ("s3://localhost/prefix", False),
    ],
)
def test_a_store_of_this_machine_is_told_from_one_in_the_network(
    url: str, *, is_here: bool
) -> None:
    assert is_on_this_machine(url) == is_here


NOBODY = "redis://192.0.2.1:1"  # an address for examples


@pytest.mark.parametrize(
    ("url", "key", "is_warned"), [(NOBODY, None, True), (NOBODY, KEY, False), (None, None, False)]
)
def test_a_store_in_the_network_without_a_key_is_warned_of(
    caplog: pytest.LogCaptureFixture, url: str | None, key: str | None, *, is_warned: bool
) -> None:
    store = open_configured(CacheSettings(cache_shared=url, cache_shared_key=key))
    assert ("--cache-shared-key" in caplog.text) == is_warned
    if store is not None:
        store.close()


@pytest.mark.parametrize(
    "settings",
    [
        CacheSettings(cache_shared_key=KEY),
        CacheSettings(cache_shared=NOBODY, cache_shared_encrypt=False),
    ],
)
def test_settings_that_would_protect_nothing_are_refused(settings: CacheSettings) -> None:
    with pytest.raises(StartupError, match="requires --cache-shared"):
        open_configured(settings)


def test_two_failures_open_the_breaker_and_stop_all_calls(
    broken: tuple[BrokenObjects, SharedStore],
) -> None:
    objects, store = broken
    objects.error = TierFailed("a timeout")
    fail(store, 2)
    objects.error = TierFailed("asked all the same")
    with pytest.raises(TierFailed, match="a timeout"):
        store.read(["e/1"], max_bytes=MANY)


def test_one_refused_connection_opens_the_breaker(
    broken: tuple[BrokenObjects, SharedStore],
) -> None:
    objects, store = broken
    objects.error = StoreUnreachable("refused")
    fail(store)
    assert store.health.trouble == "refused"


def test_a_full_store_counts_as_healthy(broken: tuple[BrokenObjects, SharedStore]) -> None:
    objects, store = broken
    objects.error = TierFull("no room")
    fail(store, 5)
    assert store.health.is_well
    objects.error = TierFailed("a timeout")
    fail(store)
    objects.error = TierFull("no room")
    fail(store)
    objects.error = TierFailed("a timeout")
    fail(store)
    assert not store.health.is_well


def test_answers_between_failures_keep_the_breaker_closed(
    broken: tuple[BrokenObjects, SharedStore],
) -> None:
    objects, store = broken
    for _ in range(3):
        objects.error = TierFailed("a timeout")
        fail(store)
        objects.error = None
        store.read(["e/1"], max_bytes=MANY)
    assert store.health.is_well


@pytest.mark.usefixtures("patient", "quick_pings")
def test_a_store_that_is_down_at_the_start_is_used_when_it_comes(server: RedisServer) -> None:
    server.kill()
    store = open_shared_store(server.url, None)
    assert not store.health.is_well
    await_change = change_of(store)
    server.start()
    await_change()
    assert store.read(["e/1"], max_bytes=MANY) == [None]
    store.close()


@pytest.mark.usefixtures("patient", "quick_pings")
def test_a_store_that_was_killed_is_used_again_when_it_is_back(server: RedisServer) -> None:
    store = open_shared_store(server.url, None)
    store.write("e/1", [b"bytes"])
    await_change = change_of(store)
    server.kill()
    fail(store)
    await_change()
    assert not store.health.is_well
    server.start()
    await_change()
    assert store.health.is_well
    store.write("e/1", [b"bytes"])
    assert store.read(["e/1"], max_bytes=MANY) == [b"bytes"]
    store.close()


@pytest.mark.usefixtures("quick_pings")
def test_a_hanging_store_is_not_used_until_it_answers(server: RedisServer) -> None:
    store = open_shared_store(server.url, None)
    await_change = change_of(store)
    server.freeze()
    fail(store, 2)
    await_change()
    assert not store.health.is_well
    server.thaw()
    await_change()
    assert store.read(["e/1"], max_bytes=MANY) == [None]
    store.close()


@pytest.mark.parametrize("url", ["memcached://store", "store:6379", "", "s3://", "redis://h:p"])
def test_an_address_of_nothing_known_is_refused(url: str) -> None:
    with pytest.raises(StartupError, match="shared store"):
        open_shared_store(url, None)


def test_a_bad_key_is_refused_before_anything_is_opened() -> None:
    with pytest.raises(StartupError, match="key of the shared store"):
        open_shared_store("redis://127.0.0.1:1", "secret")


@pytest.mark.parametrize(
    ("package", "url", "key"),
    [
        ("redis", "redis://127.0.0.1:1", None),
        ("obstore", "s3://bucket/prefix", None),
        ("cryptography", "redis://127.0.0.1:1", KEY),
    ],
)
def test_a_missing_package_is_named(
    package: str, url: str, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] == package or name.endswith("_objects"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(StartupError, match=r"pip install 'rekindle\[shared\]'"):
        open_shared_store(url, key)
