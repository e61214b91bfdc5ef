"""Objects in a real Redis."""

import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import redis

from rekindle.cache.shared import redis_objects
from rekindle.cache.shared.objects import KEEP_SECONDS
from rekindle.cache.shared.redis_objects import ANSWER_SECONDS, RedisObjects, parse_address
from rekindle.errors import StartupError, StoreUnreachable, TierFailed, TierFull
from tests.support.needs import program
from tests.support.redis_server import RedisServer, redis_server
from tests.support.server_process import free_port

PASSWORD = "open-sesame"
MIB = 1024**2
MANY = 64 * MIB


@pytest.fixture(autouse=True)
def _patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without a core is not one that fails."""
    if "hangs" not in request.node.name:
        monkeypatch.setattr(redis_objects, "CONNECT_SECONDS", 30)
        monkeypatch.setattr(redis_objects, "ANSWER_SECONDS", 30)
        monkeypatch.setattr(redis_objects, "WRITE_SECONDS", 30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def objects(server: RedisServer) -> Iterator[RedisObjects]:
    with server.client() as client:
        client.flushall()
    objects = RedisObjects(server.url)
    yield objects
    objects.close()


def n_writes(server: RedisServer) -> int:
    """How often the server has written to a client; answers to a pipeline go together."""
    with server.client() as client:
        return int(client.info("stats")["total_writes_processed"])


def test_what_was_written_is_read(objects: RedisObjects) -> None:
    objects.write("e/1", [b"head", memoryview(b"payload")])
    objects.write("e/2", [memoryview(b"alone")])
    assert objects.read(["e/1", "e/0", "e/2"], max_bytes=MANY) == [b"headpayload", None, b"alone"]
    assert objects.read(["e/1", "e/0", "e/2"], max_bytes=5) == [b"headp", None, b"alone"]
    assert objects.read([], max_bytes=MANY) == []


def test_writing_again_replaces(objects: RedisObjects) -> None:
    objects.write("e/1", [b"a longer one"])
    objects.write("e/1", [b"short"])
    assert objects.read(["e/1"], max_bytes=MANY) == [b"short"]


def test_a_value_of_tens_of_megabytes_comes_back_whole(objects: RedisObjects) -> None:
    payload = bytes(range(256)) * (24 * MIB // 256)
    objects.write("e/1", [b"head", memoryview(payload)])
    [found] = objects.read(["e/1"], max_bytes=MANY)
    assert found is not None
    assert found == b"head" + payload


def test_a_read_of_many_names_waits_for_one_answer(
    server: RedisServer, objects: RedisObjects
) -> None:
    objects.write("e/5", [b"five"])
    objects.ping()
    before = n_writes(server)
    found = objects.read([f"e/{number}" for number in range(128)], max_bytes=2)
    assert n_writes(server) - before < 20  # those of the one who counts included
    assert [each for each in found if each] == [b"fi"]


def test_members_of_groups_are_found_up_to_a_limit(objects: RedisObjects) -> None:
    for number in range(5):
        objects.add("c/a", f"member.{number}")
    objects.add("c/a", "member.0")
    found, none, few = objects.members(["c/a", "c/none"], limit=64) + objects.members(
        ["c/a"], limit=2
    )
    assert sorted(found) == [f"member.{number}" for number in range(5)]
    assert none == []
    assert len(set(few)) == 2


def test_everything_expires_unless_it_is_touched(
    server: RedisServer, objects: RedisObjects
) -> None:
    objects.write("e/1", [b"bytes"])
    objects.add("c/1", "member")
    with server.client() as client:
        names = [b"rekindle:e/1", b"rekindle:c/1"]
        assert sorted(client.keys()) == sorted(names)
        assert all(KEEP_SECONDS - 60 < client.ttl(name) <= KEEP_SECONDS for name in names)
        client.expire(names[0], 60)
        assert objects.touch(["e/1", "e/2"]) == [True, False]
        assert client.ttl(names[0]) > KEEP_SECONDS - 60


def test_what_was_removed_is_not_there(objects: RedisObjects) -> None:
    objects.write("e/1", [b"bytes"])
    objects.remove(["e/1", "e/2"])
    objects.remove([])
    assert objects.read(["e/1"], max_bytes=MANY) == [None]


def test_a_name_that_holds_another_type_is_no_failure_of_the_store(
    server: RedisServer, objects: RedisObjects
) -> None:
    """A hostile writer must not be able to open the circuit breaker."""
    with server.client() as client:
        client.lpush("rekindle:e/1", "x")
        client.set("rekindle:c/1", "x")
    [found] = objects.read(["e/1"], max_bytes=100)
    assert found is not None  # it fails the checks of a head, and is removed
    assert len(found) == 1
    assert objects.members(["c/1"], limit=5) == [[]]
    objects.add("c/1", "member")
    assert objects.members(["c/1"], limit=5) == [["member"]]
    objects.remove(["e/1"])
    assert objects.read(["e/1"], max_bytes=100) == [None]


def test_servers_with_different_prefixes_do_not_see_each_other(
    server: RedisServer, objects: RedisObjects
) -> None:
    other = RedisObjects(f"{server.url}?prefix=other&socket_timeout=30")
    other.write("e/1", [b"bytes"])
    assert objects.read(["e/1"], max_bytes=MANY) == [None]
    with server.client() as client:
        assert client.keys() == [b"other:e/1"]
    other.close()


def test_threads_do_not_get_each_others_answers(objects: RedisObjects) -> None:
    for number in range(16):
        objects.write(f"e/{number}", [str(number).encode() * 10_000])

    def read(number: int) -> bool:
        name = f"e/{number % 16}"
        return objects.read([name], max_bytes=MANY) == [str(number % 16).encode() * 10_000]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(200)))


def test_a_password_works_and_is_in_no_error(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", PASSWORD) as server:
        objects = RedisObjects(server.url)
        objects.write("e/1", [b"bytes"])
        assert PASSWORD not in objects.place
        wrong = RedisObjects(server.url.replace(PASSWORD, "not-the-password"))
        with pytest.raises(TierFailed) as refused:
            wrong.read(["e/1"], max_bytes=MANY)
        assert "not-the-password" not in refused.value.message
        server.kill()
        with pytest.raises(TierFailed) as gone:
            objects.read(["e/1"], max_bytes=MANY)
        assert PASSWORD not in gone.value.message
        wrong.close()
        objects.close()


def test_a_server_that_repeats_what_it_was_sent_does_not_give_the_password_away(
    tmp_path: Path,
) -> None:
    with redis_server(tmp_path, "--rename-command", "AUTH", "") as server:
        address = server.url.replace("redis://", f"redis://:{PASSWORD}@")
        objects = RedisObjects(address)
        with pytest.raises(TierFailed) as refused:
            objects.ping()
        assert "unknown command" in refused.value.message
        assert PASSWORD not in refused.value.message
        objects.close()


def test_a_full_store_that_evicts_takes_new_entries(tmp_path: Path) -> None:
    limits = ("--maxmemory", "16mb", "--maxmemory-policy", "allkeys-lru")
    with redis_server(tmp_path, *limits) as server:
        objects = RedisObjects(server.url)
        for number in range(20):
            objects.write(f"e/{number}", [bytes(MIB)])
        there = objects.touch([f"e/{number}" for number in range(20)])
        assert there[-1]
        assert not all(there)
        objects.close()


def test_a_full_store_that_evicts_nothing_is_full_and_not_broken(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory-policy", "noeviction") as server:
        objects = RedisObjects(server.url)
        objects.write("e/1", [bytes(2 * MIB)])
        with server.client() as client:
            client.config_set("maxmemory", "1mb")
        with pytest.raises(TierFull, match="maxmemory"):
            objects.write("e/2", [b"bytes"])
        with pytest.raises(TierFull, match="maxmemory"):
            objects.add("c/1", "member")
        assert objects.read(["e/1"], max_bytes=1) == [b"\0"]
        objects.close()


def test_a_server_that_hangs_is_given_up_and_used_again(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        objects = RedisObjects(server.url)
        objects.write("e/1", [b"bytes"])
        server.freeze()
        began_at = time.monotonic()
        with pytest.raises(TierFailed) as gave_up:
            objects.read(["e/1"], max_bytes=MANY)
        assert time.monotonic() - began_at < 10 * ANSWER_SECONDS  # not for ever
        assert not isinstance(gave_up.value, StoreUnreachable)
        server.thaw()
        assert objects.read(["e/1"], max_bytes=MANY) == [b"bytes"]
        objects.close()


def test_a_server_that_was_restarted_is_used_at_once(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        objects = RedisObjects(server.url)
        objects.write("e/1", [b"bytes"])
        server.kill()
        with pytest.raises(StoreUnreachable, match="refused"):
            objects.read(["e/1"], max_bytes=MANY)
        with pytest.raises(StoreUnreachable, match="refused"):
            objects.write("e/1", [b"bytes"])
        server.start()
        assert objects.read(["e/1"], max_bytes=MANY) == [None]
        objects.write("e/1", [b"bytes"])
        server.kill()
        server.start()
        # Both clients hold connections that are dead, and neither asks with them.
        assert objects.touch(["e/1"]) == [False]
        objects.write("e/1", [b"bytes"])
        objects.close()


def test_a_socket_works_as_well(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--unixsocket", "redis.sock"):
        objects = RedisObjects(f"unix://{tmp_path}/redis.sock?db=1")
        objects.write("e/1", [b"bytes"])
        assert objects.read(["e/1"], max_bytes=MANY) == [b"bytes"]
        objects.close()
    objects = RedisObjects(f"unix://{tmp_path}/absent.sock")
    with pytest.raises(StoreUnreachable):
        objects.ping()
    objects.close()


def test_the_objects_of_all_nodes_of_a_cluster_are_listed_and_removed(tmp_path: Path) -> None:
    with cluster(tmp_path) as url:
        objects = RedisObjects(url)
        names = [f"e/f/{number}" for number in range(200)]
        for name in names:
            objects.write(name, [b"bytes"])
        objects.add("c/f/1", "member")
        objects.write("e/other/1", [b"bytes"])
        listed = [name for page in objects.pages("ec", "f/") for name in page]
        assert sorted(listed) == sorted([*names, "c/f/1"])
        objects.remove(listed)
        assert [name for page in objects.pages("ect", "") for name in page] == ["e/other/1"]
        objects.close()


def test_a_sentinels_master_is_used(tmp_path: Path) -> None:
    with redis_server(tmp_path) as master:
        port = free_port()
        settings = tmp_path / "sentinel.conf"
        settings.write_text(
            f"port {port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {master.port} 1\n"
        )
        process = subprocess.Popen(
            [program("redis-server"), str(settings), "--sentinel"], stdout=subprocess.DEVNULL
        )
        try:
            with redis.Redis(port=port) as client:
                eventually(client.ping)
            objects = RedisObjects(f"redis+sentinel://127.0.0.1:{port}/main/0")
            objects.write("e/1", [b"bytes"])
            assert objects.read(["e/1"], max_bytes=MANY) == [b"bytes"]
            assert list(objects.pages("e", "")) == [["e/1"]]
            objects.close()
        finally:
            process.kill()
            process.wait()


def eventually(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while True:
        with suppress(redis.RedisError):
            if is_so():
                return
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """Two servers with half of the slots each."""
    with ExitStack() as stack:
        servers = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
            servers.append(stack.enter_context(redis_server(folder / name, *options)))
        one, two = (stack.enter_context(server.client()) for server in servers)
        one.execute_command("CLUSTER ADDSLOTSRANGE", 0, 8191)
        two.execute_command("CLUSTER ADDSLOTSRANGE", 8192, 16383)
        bus = two.config_get("cluster-port")["cluster-port"]
        one.execute_command("CLUSTER MEET", "127.0.0.1", servers[1].port, bus)

        def is_ready(client: redis.Redis) -> bool:
            state: dict[str, str] = client.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]
            return state["cluster_state"] == "ok"

        for client in (one, two):
            eventually(lambda: is_ready(client))  # noqa: B023
        yield f"redis+cluster://127.0.0.1:{servers[0].port}"


def test_sentinels_are_read_from_a_url() -> None:
    address = parse_address(
        f"redis+sentinel://me:{PASSWORD}@one:26380,two,[::1]:7/main/3?prefix=p&health_check_interval=5"
    )
    assert address.hosts == (("one", 26380), ("two", 26379), ("::1", 7))
    assert address.master == "main"
    assert address.prefix == "p"
    assert address.options == {
        "username": "me",
        "password": PASSWORD,
        "db": 3,
        "health_check_interval": 5,
    }
    assert address.place == "redis+sentinel://one:26380,two,[::1]:7/main/3"


def test_a_cluster_is_read_from_a_url() -> None:
    address = parse_address(f"redis+cluster://:{PASSWORD}@one:7000,two:7001")
    assert address.hosts == (("one", 7000), ("two", 7001))
    assert address.options == {"password": PASSWORD}
    assert address.place == "redis+cluster://one:7000,two:7001"
    assert parse_address("redis+cluster://one/0").hosts == (("one", 6379),)


def test_escaped_passwords_and_tls_are_read_from_a_url() -> None:
    address = parse_address("rediss://me:a%2Fb%40c@store:6380/2?ssl_cert_reqs=none")
    assert address.options["password"] == "a/b@c"
    assert address.options["ssl_cert_reqs"] == "none"
    assert address.place == "rediss://store:6380/2"


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{PASSWORD}/x@store:6379",
        f"redis://:123/{PASSWORD}@store:6379",
        f"redis://:123#{PASSWORD}@store:6379",
        f"redis://:{PASSWORD}@store:port",
        f"redis://:{PASSWORD}@store?socket_timeout=soon",
        f"redis://:{PASSWORD}@store?no_such_option=1",
        f"redis+sentinel://:{PASSWORD}@store",
        f"redis+sentinel://:{PASSWORD}@/main",
        f"redis+cluster://:{PASSWORD}@one,,two",
    ],
)
def test_an_address_that_cannot_be_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(StartupError, match="redis-py") as refused:
        RedisObjects(url)
    assert PASSWORD not in refused.value.message


@pytest.mark.parametrize(
    "url", ["redis+sentinel://127.0.0.1:1/main", "redis+cluster://127.0.0.1:1"]
)
def test_sentinels_and_clusters_that_are_down_are_out_of_reach(url: str) -> None:
    objects = RedisObjects(url)
    with pytest.raises(StoreUnreachable):
        objects.ping()
    objects.close()
