"""A shared store that others can write to, or that is itself hostile: nothing wrong is used, and
every answer costs a bounded time and memory."""

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rekindle.cache.entry import Entry, Kind, encode_preamble
from rekindle.cache.shared import redis_objects
from rekindle.cache.shared.heads import HEAD_BYTES, MAX_PAYLOAD_BYTES, OWNER_BYTES, encode_owner
from rekindle.cache.shared.redis_objects import RedisObjects
from rekindle.cache.shared.s3_objects import S3Objects
from rekindle.errors import CacheError, EntryCorrupt, TierFailed
from rekindle.generation.forgetting import Owner
from tests.support.memory_objects import SEALS, MemoryObjects
from tests.support.shared_entries import B, Prompt, looked_up, make_tier, name_in, prompt, put_all

MIB = 2**20
KEYED = pytest.mark.parametrize("seal", ["mac", "sealed"])
all_seals = pytest.mark.parametrize("seal", list(SEALS))


# -- a hostile writer ------------------------------------------------------------------------------


@KEYED
@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_writer_without_the_key_does_only_what_was_stored_is_read(
    seal: str, seed: int
) -> None:
    """Flipped bits, swapped, replayed, cut, longer and forged objects, and groups that lie."""
    noise = random.Random(seed)
    objects = MemoryObjects()
    tier = make_tier(objects, seal=seal)
    known = Prompt(prompt(4 * B + 100))
    entries = [*known.blocks(4), known.entry(Kind.BLOCK, 4 * B + 100)]
    put_all(tier, entries)
    by_key = {entry.header.key: entry for entry in entries}
    older = dict(objects.objects)
    for _ in range(60):
        _attack(objects, older, noise)
        found = tier.look_up(
            "", known.parents[0], 0, known.tokens, has_rows=True, has_checkpoints=False
        )
        assert all(by_key[head.header.key].header == head.header for head in found.heads)
        for key, entry in by_key.items():
            try:
                got = tier.get(key)
            except CacheError:
                continue
            assert (got.header, bytes(got.payload)) == (entry.header, entry.payload)
        if noise.random() < 0.3:
            put_all(tier, entries)


@KEYED
def test_a_payload_without_the_key_is_corrupt_even_if_its_checksum_matches(
    seal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = MemoryObjects()
    tier = make_tier(objects, seal=seal)
    [entry] = Prompt(prompt(B)).blocks(1)
    name = name_in(objects, tier, entry)
    data = bytearray(objects.objects[name])
    data[-40] ^= 1
    objects.objects[name] = bytes(data)
    monkeypatch.setattr("rekindle.cache.shared.tier.checksum", AnyChecksum)
    with pytest.raises(EntryCorrupt):
        tier.get(entry.header.key)


class AnyChecksum:
    """Equal to every other: a writer can make any checksum match."""

    def __init__(self, _payload: object) -> None: ...

    def __ne__(self, other: object) -> bool:
        return False


def _attack(objects: MemoryObjects, older: dict[str, bytes], noise: random.Random) -> None:
    names = sorted(objects.objects)
    if not names:
        return
    name, other = noise.choice(names), noise.choice(names)
    data = bytearray(objects.objects[name])
    kind = noise.randrange(7)
    if kind == 0 and data:
        data[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
    elif kind == 1:
        data = bytearray(objects.objects[other])
    elif kind == 2:
        data = bytearray(older[noise.choice(sorted(older))])
    elif kind == 3:
        del data[noise.randrange(len(data) + 1) :]
    elif kind == 4:
        data += noise.randbytes(noise.randrange(1, 2000))
    elif kind == 5:
        head = len(data) // 2
        data = data[:head] + bytearray(objects.objects[other])[head:]
    else:
        for members in objects.groups.values():
            members |= {
                f"1.{noise.randrange(-5, 10**6)}.{noise.choice('0af')}",
                "1.100.0",
                "x" * 99,
            }
    objects.objects[name] = bytes(data)


def test_without_a_key_a_forged_entry_is_used() -> None:
    """The reason for the warning at the start: checksums are no protection."""
    objects = MemoryObjects()
    tier = make_tier(objects)
    entry = Prompt(prompt(B)).entry(Kind.BLOCK, B)
    name = name_in(objects, tier, entry)
    forged = Entry(entry.header, bytes(100))
    objects.objects[name] = _unsealed(forged) + bytes(forged.payload)
    assert bytes(tier.get(entry.header.key).payload) == bytes(100)


@KEYED
def test_with_a_key_a_forged_entry_is_a_miss_that_is_counted_and_removed(seal: str) -> None:
    objects = MemoryObjects()
    tier = make_tier(objects, seal=seal)
    known = Prompt(prompt(B))
    entry = known.entry(Kind.BLOCK, B)
    name = name_in(objects, tier, entry)
    objects.objects[name] = bytes(28) + _unsealed(entry) + bytes(28) + bytes(entry.payload)
    found = tier.look_up(
        "", known.parents[0], 0, known.tokens, has_rows=True, has_checkpoints=False
    )
    assert (found.heads, found.n_corrupt) == ([], 1)
    assert not objects.objects


@pytest.mark.parametrize(
    "field", ["payload_bytes", "compute_seconds", "created_at", "asked_at", "session"]
)
def test_a_head_with_impossible_numbers_is_a_miss(field: str) -> None:
    objects = MemoryObjects()
    tier = make_tier(objects)
    known = Prompt(prompt(B))
    entry = known.entry(Kind.BLOCK, B)
    name = name_in(objects, tier, entry)
    owner = Owner(namespace="", session="x", asked_at=1.0)
    changed = {
        "payload_bytes": MAX_PAYLOAD_BYTES + 1,
        "compute_seconds": float("inf"),
        "created_at": float("nan"),
    }
    header = entry.header
    if field in changed:
        object.__setattr__(header, field, changed[field])
    elif field == "asked_at":
        owner = Owner(namespace="", session="x", asked_at=float("nan"))
    head = bytearray(_unsealed(Entry(header, entry.payload), owner))
    if field == "session":
        struct.pack_into("<H", head, 8, 60_000)
    objects.objects[name] = bytes(head) + bytes(entry.payload)
    assert looked_up(tier, known.tokens) == []
    assert not objects.objects


@all_seals
def test_no_more_is_read_of_an_object_than_its_head_says(seal: str) -> None:
    objects = MemoryObjects()
    tier = make_tier(objects, seal=seal)
    entry = Prompt(prompt(B)).entry(Kind.BLOCK, B)
    name = name_in(objects, tier, entry)
    objects.objects[name] += bytes(10 * MIB)
    asked: list[int] = []
    read = objects.read

    def counted(names: list[str], *, max_bytes: int) -> list[bytes | None]:
        asked.append(max_bytes)
        return read(names, max_bytes=max_bytes)

    objects.read = counted  # type: ignore[assignment, method-assign]
    with pytest.raises(EntryCorrupt):
        tier.get(entry.header.key)
    overhead = SEALS[seal].OVERHEAD_BYTES
    assert asked == [HEAD_BYTES + len(entry.payload) + 2 * overhead + 1]


def _unsealed(entry: Entry, owner: Owner | None = None) -> bytes:
    """A head that a writer without a key can make."""
    owner = owner or Owner(namespace="", session="x", asked_at=1.0)
    return (encode_owner(owner) + encode_preamble(entry)).ljust(HEAD_BYTES, b"\0")


def test_servers_with_different_settings_leave_each_others_objects_alone() -> None:
    objects = MemoryObjects()
    known = Prompt(prompt(3 * B + 50))
    entries = [*known.blocks(3), known.entry(Kind.BLOCK, 3 * B + 50)]
    for _ in range(3):
        for seal in SEALS:
            tier = make_tier(objects, seal=seal)
            put_all(tier, entries)
            assert len(looked_up(tier, known.tokens)) == 4
    assert objects.calls["write"] == 4 * len(SEALS)
    assert objects.calls["remove"] == 0


# -- a hostile Redis -------------------------------------------------------------------------------


@contextmanager
def hostile_redis(answer: Callable[[socket.socket], None]) -> Iterator[RedisObjects]:
    """A server that answers the client's greeting well, and everything after it with `answer`."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_sockets: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        try:
            while request := connection.recv(65536):
                if b"SETINFO" in request:
                    connection.sendall(b"+OK\r\n" * request.count(b"SETINFO"))
                else:
                    answer(connection)
        except OSError:
            pass

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            open_sockets.append(connection)
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    objects = RedisObjects(f"redis://127.0.0.1:{listener.getsockname()[1]}/0")
    try:
        yield objects
    finally:
        objects.close()
        listener.close()
        for each in open_sockets:
            each.close()


def every_call(objects: RedisObjects) -> list[Callable[[], object]]:
    return [
        lambda: objects.read(["e/1"], max_bytes=100),
        lambda: objects.members(["c/1"], limit=10),
        lambda: objects.touch(["e/1"]),
        lambda: list(objects.pages("ect", "")),
    ]


@pytest.mark.parametrize(
    "reply",
    [
        b":7\r\n",
        b"+OK\r\n",
        b"*2\r\n:1\r\n:2\r\n",
        b"*1\r\n*1\r\n*1\r\n:1\r\n",
        b"*-1\r\n",
        b"$-1\r\n",
        b"*2\r\n$1\r\nx\r\n*1\r\n$1\r\ny\r\n",
        b"-ERR no\r\n",
        b"*4000000000\r\n",
        b"hello\r\n",
        b"\0\0\0\0\r\n",
    ],
)
def test_answers_of_the_wrong_type_are_failures_or_misses(reply: bytes) -> None:
    with hostile_redis(lambda connection: connection.sendall(reply)) as objects:
        for call in every_call(objects):
            with suppress(TierFailed):
                call()


def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_objects, "MAX_ANSWER_BYTES", 4 * MIB)

    def endless(connection: socket.socket) -> None:
        connection.sendall(b"$10000000000\r\n")
        while True:
            connection.sendall(bytes(65536))

    with hostile_redis(endless) as objects, pytest.raises(TierFailed, match="too long"):
        objects.read(["e/1"], max_bytes=100)


def test_an_answer_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_objects, "MAX_ANSWER_SECONDS", 0.5)

    def drip(connection: socket.socket) -> None:
        connection.sendall(b"$1000\r\n")
        for _ in range(1000):
            connection.sendall(b"x")
            time.sleep(0.05)

    with hostile_redis(drip) as objects, pytest.raises(TierFailed, match="too long"):
        objects.read(["e/1"], max_bytes=100)


def test_a_longer_list_of_members_than_asked_for_is_cut() -> None:
    members = b"*1000\r\n" + b"$1\r\nx\r\n" * 1000
    with hostile_redis(lambda connection: connection.sendall(members)) as objects:
        [found] = objects.members(["c/1"], limit=10)
        assert len(found) == 10


# -- a hostile S3 ----------------------------------------------------------------------------------


class _HostileS3(BaseHTTPRequestHandler):
    """Ignores ranges, and sends more than was asked for."""

    def do_GET(self) -> None:
        self.send_response(206)
        self.send_header("Content-Length", str(10_000 * MIB))
        self.send_header("Content-Range", f"bytes 0-{10_000 * MIB - 1}/{10_000 * MIB}")
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Mon, 16 Nov 2026 00:00:00 GMT")
        self.end_headers()
        try:
            while True:
                self.wfile.write(bytes(MIB))
                self.server.n_sent += 1  # type: ignore[attr-defined]
        except OSError:
            pass

    def log_message(self, *args: object) -> None:
        pass


def test_an_object_of_ten_gigabytes_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _HostileS3)
    server.n_sent = 0  # type: ignore[attr-defined]
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "some-secret")
    objects = S3Objects("s3://bucket/prefix")
    try:
        [found] = objects.read(["e/1"], max_bytes=3 * MIB)
        assert found is None or len(found) <= 3 * MIB
    except TierFailed:
        pass
    finally:
        objects.close()
        server.shutdown()
        server.server_close()
    assert server.n_sent < 100  # type: ignore[attr-defined]


def test_the_owner_is_at_the_beginning_of_a_head() -> None:
    """Deletions of other versions rely on it."""
    head = _unsealed(Prompt(prompt(B)).entry(Kind.BLOCK, B))
    assert head[OWNER_BYTES : OWNER_BYTES + 4] == b"RKND"
