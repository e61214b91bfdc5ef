"""Objects in Redis or Valkey: one server, behind Sentinel, or a cluster.

Objects are strings that expire a week after their last use; groups are sets. Each call is one
pipeline, however many names it has. Needs the package `redis`.
"""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from socket import gaierror
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.connection import parse_url
from redis.exceptions import OutOfMemoryError, RedisClusterException
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from rekindle.errors import StartupError, StoreUnreachable, TierFailed, TierFull
from rekindle.generation.model_state import Payload

# All of these are picked.
KEEP_SECONDS = 7 * 24 * 3600
CONNECT_SECONDS = 0.5
ANSWER_SECONDS = 1.0  # until the next bytes of an answer
WRITE_SECONDS = 5.0  # for all of a value, which may be tens of megabytes
DEFAULT_PREFIX = "rekindle"
READ_BYTES = 256 * 1024  # at once, from a socket

SENTINEL = "redis+sentinel"
CLUSTER = "redis+cluster"
DEFAULT_PORTS = {SENTINEL: 26379, CLUSTER: 6379}

_OPTIONS_OF_POOLS = ("connection_class", "max_connections", "ssl")
_FAILURES = (redis.RedisError, RedisClusterException, OSError)
_NOBODY_LISTENS = (ConnectionRefusedError, FileNotFoundError, gaierror)
_BAD_URL = (
    "redis-py does not understand the address of the shared store."
    " Write special characters in a password as %XX."
)

Client = redis.Redis | redis.RedisCluster


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

    def read(self, names: Sequence[str], *, first_bytes: int | None = None) -> list[bytes | None]:
        if first_bytes is None:
            return self._pipeline([("GET", self._key(name)) for name in names])
        ranges = [("GETRANGE", self._key(name), 0, first_bytes - 1) for name in names]
        # A missing object reads as an empty string.
        return [found or None for found in self._pipeline(ranges)]

    def write(self, name: str, parts: Sequence[Payload]) -> None:
        value = parts[0] if len(parts) == 1 else b"".join(parts)
        key = self._key(name)
        self._try(lambda: self._writer.get().set(key, value, ex=KEEP_SECONDS))

    def add(self, group: str, member: str) -> None:
        key = self._key(group)
        self._pipeline([("SADD", key, member), ("EXPIRE", key, KEEP_SECONDS)])

    def members(self, groups: Sequence[str], *, limit: int) -> list[list[str]]:
        found = self._pipeline([("SRANDMEMBER", self._key(group), limit) for group in groups])
        return [[member.decode() for member in members] for members in found]

    def touch(self, names: Sequence[str]) -> list[bool]:
        expiries = [("EXPIRE", self._key(name), KEEP_SECONDS) for name in names]
        return [bool(is_there) for is_there in self._pipeline(expiries)]

    def remove(self, names: Sequence[str]) -> None:
        self._pipeline([("UNLINK", self._key(name)) for name in names])

    def ping(self) -> None:
        self._try(lambda: self._reader.get().ping())

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _pipeline(self, commands: Sequence[tuple[str | int, ...]]) -> list[Any]:
        """Return the commands' answers. Raise the first error among them."""

        def run() -> list[Any]:
            with self._reader.get().pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                # redis-py would put the whole command, with its values, into the error's text.
                answers = pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return answers

        return self._try(run) if commands else []

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except OutOfMemoryError as error:
            raise TierFull(self._message(error)) from error
        except _FAILURES as error:
            kind = StoreUnreachable if _nobody_listens(error) else TierFailed
            raise kind(self._message(error)) from error

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
            return redis.RedisCluster(startup_nodes=nodes, **options)
        if address.scheme == SENTINEL:
            self._sentinel = Sentinel(  # type: ignore[no-untyped-call]
                address.hosts, sentinel_kwargs=common, **options
            )
            client: redis.Redis = self._sentinel.master_for(address.master)  # type: ignore[no-untyped-call]
            return client
        return redis.Redis.from_pool(redis.ConnectionPool(**options))


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
