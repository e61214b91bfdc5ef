"""Objects in Redis or Valkey: one server, behind Sentinel, or a cluster.

Objects are strings that expire a week after their last use; groups are sets. Each call is one
pipeline, however many names it has. Needs the package `redis`.
"""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.connection import Connection, DefaultParser, parse_url
from redis.exceptions import OutOfMemoryError, RedisClusterException
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from rekindle.cache.shared.objects import KEEP_SECONDS
from rekindle.errors import StartupError, StoreUnreachable, TierFailed, TierFull
from rekindle.generation.model_state import Payload

# All of these are picked.
CONNECT_SECONDS = 0.5
ANSWER_SECONDS = 1.0  # until the next bytes of an answer
WRITE_SECONDS = 5.0  # for all of a value, which may be tens of megabytes
DEFAULT_PREFIX = "rekindle"
READ_BYTES = 256 * 1024  # at once, from a socket
MAX_ANSWER_BYTES = 600 * 2**20  # Redis itself holds at most 512 MiB in one value
MAX_ANSWER_SECONDS = 30.0  # for all of one answer
SCAN_COUNT = 1000  # names that the server looks at for one page of a listing
MAX_REMOVED = 1000  # names in one call

SENTINEL = "redis+sentinel"
CLUSTER = "redis+cluster"
DEFAULT_PORTS = {SENTINEL: 26379, CLUSTER: 6379}

_OPTIONS_OF_POOLS = ("connection_class", "max_connections", "ssl")
_FAILURES = (redis.RedisError, RedisClusterException, OSError)
_NOBODY_LISTENS = (ConnectionRefusedError, FileNotFoundError, socket.gaierror)
_BAD_URL = (
    "redis-py does not understand the address of the shared store."
    " Write special characters in a password as %XX."
)

_WRONG_TYPES = (TypeError, ValueError, AttributeError, LookupError, MemoryError)
_NO_OBJECT = b"\0"  # too short for any object
_NOT_REDIS = "it answers otherwise than Redis"

Client = redis.Redis | redis.RedisCluster
Command = tuple[str | int | bytes, ...]
Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class RedisAddress:
    scheme: str
    place: str
    prefix: str
    hosts: tuple[tuple[str, int], ...]  # sentinels, or nodes of a cluster; else empty
    master: str  # its name among the sentinels
    options: dict[str, Any]  # redis-py's connection options


class RedisObjects:
    reads_are_dear = False

    def __init__(self, url: str) -> None:
        """Connect to nothing yet. Raises StartupError."""
        address = parse_address(url)
        self.place = address.place
        self._prefix = address.prefix
        self._password = address.options.get("password")
        self._reader = _LazyClient(address, answer_seconds=ANSWER_SECONDS)
        self._writer = _LazyClient(address, answer_seconds=WRITE_SECONDS)

    def read(self, names: Sequence[str], *, max_bytes: int) -> list[bytes | None]:
        ranges = [("GETRANGE", self._key(name), 0, max_bytes - 1) for name in names]
        # A missing object reads as an empty string.
        answers = self._pipeline(ranges, other_type=_NO_OBJECT)
        return [_checked(found, bytes) or None for found in answers]

    def write(self, name: str, parts: Sequence[Payload]) -> None:
        value = parts[0] if len(parts) == 1 else b"".join(parts)
        key = self._key(name)
        self._try(lambda: self._writer.get().set(key, value, ex=KEEP_SECONDS))

    def overwrite(self, name: str, start: Payload) -> None:
        """If the object has expired, this makes one without its end. Readers remove that."""
        key = self._key(name)
        commands: list[Command] = [
            ("SETRANGE", key, 0, bytes(start)),
            ("EXPIRE", key, KEEP_SECONDS),
        ]
        self._pipeline(commands, other_type=_NO_OBJECT)

    def add(self, group: str, member: str, *, keep_seconds: int = KEEP_SECONDS) -> None:
        key = self._key(group)
        commands: list[Command] = [("SADD", key, member), ("EXPIRE", key, keep_seconds)]
        if self._pipeline(commands, other_type=_NO_OBJECT)[0] is _NO_OBJECT:
            self._pipeline([("UNLINK", key), *commands])

    def members(self, groups: Sequence[str], *, limit: int) -> list[list[str]]:
        asked = [("SRANDMEMBER", self._key(group), limit) for group in groups]
        found = self._pipeline(asked, other_type=[])
        return [_texts(_checked(members, list)[:limit]) for members in found]

    def touch(self, names: Sequence[str]) -> list[bool]:
        expiries = [("EXPIRE", self._key(name), KEEP_SECONDS) for name in names]
        return [bool(is_there) for is_there in self._pipeline(expiries)]

    def discard(self, group: str, members: Sequence[str]) -> None:
        if members:
            self._pipeline([("SREM", self._key(group), *members)])

    def remove(self, names: Sequence[str]) -> None:
        for first in range(0, len(names), MAX_REMOVED):
            some = names[first : first + MAX_REMOVED]
            self._pipeline([("UNLINK", self._key(name)) for name in some])

    def pages(self, kinds: str, folder: str) -> Iterator[list[str]]:
        pattern = f"{_escaped(self._prefix)}:[{kinds}]/{folder}*"
        n_prefix = len(self._prefix) + 1
        for node in self._try(self._nodes):
            cursor = 0
            while True:
                cursor, found = self._try(lambda: _scan(node, cursor, pattern))  # noqa: B023
                yield [name[n_prefix:] for name in found]
                if cursor == 0:
                    break

    def ping(self) -> None:
        self._try(lambda: self._reader.get().ping())

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _nodes(self) -> list[redis.Redis]:
        """Return a client for each server that holds objects."""
        client = self._reader.get()
        if not isinstance(client, redis.RedisCluster):
            return [client]
        return [client.get_redis_connection(node) for node in client.get_primaries()]  # type: ignore[no-untyped-call]

    def _pipeline(self, commands: Sequence[Command], *, other_type: Any = None) -> list[Any]:
        """Return the commands' answers. Raise the first error among them.

        `other_type` is the answer for a name that holds another type: a hostile writer made it.
        """

        def run() -> list[Any]:
            with self._reader.get().pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                # redis-py would put the whole command, with its values, into the error's text.
                answers = pipeline.execute(raise_on_error=False)
            if not any(isinstance(answer, Exception) for answer in answers):
                return answers
            return [_unless_of_other_type(answer, other_type) for answer in answers]

        return self._try(run) if commands else []

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except OutOfMemoryError as error:
            raise TierFull(self._message(error)) from error
        except _FAILURES as error:
            kind = StoreUnreachable if _nobody_listens(error) else TierFailed
            raise kind(self._message(error)) from error
        except _WRONG_TYPES as error:  # of redis-py, which trusts the answers
            raise TierFailed(_NOT_REDIS) from error

    def _message(self, error: Exception) -> str:
        """Return the error's text without the password: a server without AUTH repeats it."""
        text = str(error) or type(error).__name__
        if isinstance(error, MasterNotFoundError):
            text = text.partition(" : ")[0]  # redis-py adds all it knows about each sentinel
        return text.replace(self._password, "***") if self._password else text


class _LazyClient:
    """A client made on first use: a cluster's client connects when it is made."""

    def __init__(self, address: RedisAddress, *, answer_seconds: float) -> None:
        self._address = address
        self._answer_seconds = answer_seconds
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._sentinel: Sentinel | None = None

    def get(self) -> Client:
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def close(self) -> None:
        with self._lock:
            for each in (self._client, self._sentinel):
                if each is not None:
                    each.close()

    def _connect(self) -> Client:
        address = self._address
        common = {
            "socket_connect_timeout": CONNECT_SECONDS,
            "socket_timeout": self._answer_seconds,
            "socket_read_size": READ_BYTES,
            # redis-py reopens a pooled connection that the server closed even without retries.
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        options = {**common, **address.options}
        if address.scheme == CLUSTER:
            nodes = [ClusterNode(*each) for each in address.hosts]  # type: ignore[no-untyped-call]
            options["retry"] = Retry(NoBackoff(), 1)  # for a slot that has moved
            options["redis_connect_func"] = _bound_answers
            return redis.RedisCluster(startup_nodes=nodes, **options)
        if address.scheme == SENTINEL:
            self._sentinel = Sentinel(  # type: ignore[no-untyped-call]
                address.hosts, sentinel_kwargs=common, **options
            )
            client: redis.Redis = self._sentinel.master_for(  # type: ignore[no-untyped-call]
                address.master, parser_class=_BoundedParser
            )
            return client
        pool = redis.ConnectionPool(**options, parser_class=_BoundedParser)
        return redis.Redis.from_pool(pool)


class _BoundedParser(DefaultParser):  # type: ignore[misc, valid-type]
    """Limits each answer. redis-py limits only the wait for the next bytes."""

    def on_connect(self, connection: Connection, **options: Any) -> None:
        super().on_connect(connection, **options)
        assert connection._sock is not None
        self._sock: _MeteredSocket | None = _MeteredSocket(connection._sock)

    def read_response(self, *args: Any, **options: Any) -> Any:
        if self._sock is not None:
            self._sock.begin_answer()
        return super().read_response(*args, **options)


def _bound_answers(connection: Connection) -> None:
    """Give a connected client the parser above: a cluster's client lets nobody choose one."""
    connection.set_parser(_BoundedParser)  # type: ignore[no-untyped-call]
    connection._parser.on_connect(connection)


class _MeteredSocket:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.begin_answer()

    def begin_answer(self) -> None:
        self._n_bytes = 0

    def recv_into(self, buffer: bytearray) -> int:
        now = time.monotonic()
        if self._n_bytes == 0:
            self._deadline = now + MAX_ANSWER_SECONDS
        if self._n_bytes > MAX_ANSWER_BYTES:
            raise redis.ConnectionError("an answer is too long")
        if now > self._deadline:
            raise redis.TimeoutError("an answer took too long")
        n_bytes = self._socket.recv_into(buffer)
        self._n_bytes += n_bytes
        return n_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def parse_address(url: str) -> RedisAddress:
    """Parse the URL. Raises StartupError, whose text has no part of the URL."""
    try:
        return _parse(url)
    except (ValueError, TypeError):
        raise StartupError(_BAD_URL) from None


def _parse(url: str) -> RedisAddress:
    # Hosts are parsed by hand: urlsplit refuses a list of hosts with an IPv6 address.
    scheme_name, _, rest = url.partition("://")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    parts = urlsplit(f"{scheme_name}://host{rest.removeprefix(authority)}")
    login, at, netloc = authority.rpartition("@")
    # A password with an unescaped / or # ends up like this.
    if parts.fragment or (parts.scheme != "unix" and netloc.partition(":")[0] == ""):
        raise ValueError("there is no host")
    query = dict(parse_qsl(parts.query))
    prefix = query.pop("prefix", DEFAULT_PREFIX)
    master, path = "", parts.path
    if parts.scheme == SENTINEL:
        master, _, database = unquote(path).strip("/").partition("/")
        path = f"/{database}"
        if not master:
            raise ValueError("the master has no name")
    scheme = parts.scheme.partition("+")[0]
    first_host = netloc.partition(",")[0]
    one_server = f"{scheme}://{login}{at}{first_host}{path}?{urlencode(query)}"
    options: dict[str, Any] = parse_url(one_server)  # type: ignore[no-untyped-call]
    _check_options(options)
    hosts: tuple[tuple[str, int], ...] = ()
    if parts.scheme in (SENTINEL, CLUSTER):
        port = DEFAULT_PORTS[parts.scheme]
        hosts = tuple(_host_and_port(each, port) for each in netloc.split(","))
        not_theirs = ("host", "port", "db") if parts.scheme == CLUSTER else ("host", "port")
        options = {name: value for name, value in options.items() if name not in not_theirs}
    return RedisAddress(
        scheme=parts.scheme,
        place=f"{parts.scheme}://{netloc}{parts.path}",
        prefix=prefix,
        hosts=hosts,
        master=master,
        options=options,
    )


def _check_options(options: dict[str, Any]) -> None:
    """Check the options now: redis-py would reject most of them only when it connects."""
    of_connections = {
        name: value for name, value in options.items() if name not in _OPTIONS_OF_POOLS
    }
    options.get("connection_class", redis.Connection)(**of_connections)


def _host_and_port(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a host has no name")
    return parts.hostname, parts.port or default_port


def _nobody_listens(error: Exception) -> bool:
    if isinstance(error, MasterNotFoundError | RedisClusterException):
        return True
    return isinstance(error, redis.ConnectionError) and isinstance(
        error.__context__, _NOBODY_LISTENS
    )


def _scan(node: redis.Redis, cursor: int, pattern: str) -> tuple[int, list[str]]:
    """Return the next cursor, and the names of one page."""
    answer = node.execute_command("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)  # type: ignore[no-untyped-call]
    next_cursor, names = answer
    return int(next_cursor), _texts(_checked(names, list))


def _unless_of_other_type(answer: Any, instead: Any) -> Any:
    if not isinstance(answer, Exception):
        return answer
    if instead is not None and str(answer).startswith("WRONGTYPE"):
        return instead
    raise answer


def _checked(answer: Any, kind: type[Kind]) -> Kind:
    if not isinstance(answer, kind):
        raise TierFailed(_NOT_REDIS)
    return answer


def _texts(members: list[Any]) -> list[str]:
    """Return the names; one that is not a text is one that nobody wrote."""
    return [each.decode(errors="replace") for each in members if isinstance(each, bytes)]


def _escaped(text: str) -> str:
    """Return a text whose characters have no meaning in a pattern of Redis."""
    return re.sub(r"([*?\[\]^\\])", r"\\\1", text)
