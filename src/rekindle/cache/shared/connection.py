"""The shared store, which several servers use, opened once for the process."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from rekindle.cache.shared.health import DEAR_PING_SECONDS, PING_SECONDS, StoreHealth
from rekindle.cache.shared.objects import ObjectStore
from rekindle.cache.shared.sealing import NoSeal, Seal, new_seal
from rekindle.errors import StartupError, StoreUnreachable, TierFailed, TierFull
from rekindle.generation.model_state import Payload

REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "redis+cluster")
S3_SCHEME = "s3"
MISSING = "A shared store needs packages that are not installed: pip install 'rekindle[shared]'."

Answer = TypeVar("Answer")


class SharedStore:
    """An object store behind its circuit breaker: calls fail at once while the store is down."""

    def __init__(self, objects: ObjectStore, seal: Seal | NoSeal) -> None:
        ping_seconds = DEAR_PING_SECONDS if objects.reads_are_dear else PING_SECONDS
        self.health = StoreHealth(objects.place, objects.ping, ping_seconds=ping_seconds)
        self.seal = seal
        self.place = objects.place
        self.reads_are_dear = objects.reads_are_dear
        self._objects = objects

    def read(self, names: Sequence[str], *, first_bytes: int | None = None) -> list[bytes | None]:
        return self._ask(lambda: self._objects.read(names, first_bytes=first_bytes))

    def write(self, name: str, parts: Sequence[Payload]) -> None:
        self._ask(lambda: self._objects.write(name, parts))

    def add(self, group: str, member: str) -> None:
        self._ask(lambda: self._objects.add(group, member))

    def members(self, groups: Sequence[str], *, limit: int) -> list[list[str]]:
        return self._ask(lambda: self._objects.members(groups, limit=limit))

    def touch(self, names: Sequence[str]) -> list[bool]:
        return self._ask(lambda: self._objects.touch(names))

    def remove(self, names: Sequence[str]) -> None:
        self._ask(lambda: self._objects.remove(names))

    def close(self) -> None:
        self.health.close()
        self._objects.close()

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        if trouble := self.health.trouble:
            raise TierFailed(f"the shared store at {self.place} is down: {trouble}")
        began_at = self.health.now()
        try:
            answer = call()
        except TierFailed as error:
            if not isinstance(error, TierFull):  # a full store works
                is_final = isinstance(error, StoreUnreachable)
                self.health.note_failure(error.message, is_final=is_final)
            raise
        self.health.note_success(began_at=began_at)
        return answer


def open_shared_store(url: str, key: str | None) -> SharedStore:
    """Open the store. A store that is down is used once it is back. Raises StartupError."""
    try:
        seal = new_seal(key)
        objects = _open_objects(url)
    except ModuleNotFoundError as error:
        raise StartupError(MISSING) from error
    store = SharedStore(objects, seal)
    store.health.check()
    return store


def _open_objects(url: str) -> ObjectStore:
    """Import the client class on demand: its packages are optional."""
    scheme = url.partition("://")[0]
    if scheme == S3_SCHEME:
        from rekindle.cache.shared.s3_objects import S3Objects

        return S3Objects(url)
    if scheme in REDIS_SCHEMES:
        from rekindle.cache.shared.redis_objects import RedisObjects

        return RedisObjects(url)
    schemes = ", ".join(f"{each}://" for each in (*REDIS_SCHEMES, S3_SCHEME))
    raise StartupError(f"The address of the shared store must begin with one of {schemes}.")
