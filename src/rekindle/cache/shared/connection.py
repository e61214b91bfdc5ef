"""The shared store, which several servers use, opened once for the process."""

import re
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from rekindle.cache.shared.deletion import OnProgress
from rekindle.cache.shared.health import GuardedObjects
from rekindle.cache.shared.objects import ObjectStore
from rekindle.cache.shared.sealing import Seal, new_seal
from rekindle.cache.shared.tombstones import FORGET_SECONDS, StoreDeletions
from rekindle.errors import StartupError
from rekindle.generation.forgetting import Deleted, Tombstone, Tombstones

REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "redis+cluster")
S3_SCHEME = "s3"
MISSING = "A shared store needs packages that are not installed: pip install 'rekindle[shared]'."


class SharedStore(GuardedObjects):
    """The objects of a store, their protection, and the deletions that all its servers share."""

    def __init__(self, objects: ObjectStore, seal: Seal) -> None:
        super().__init__(objects)
        self.seal = seal
        self.deletions = StoreDeletions(self, seal, Tombstones())

    def start(self) -> None:
        """Read the deletions of other servers, now and from time to time."""
        self.health.check()
        self.deletions.start()

    def close(self) -> None:
        self.deletions.close()
        super().close()

    def forget(
        self,
        tombstone: Tombstone,
        *,
        seconds: float = FORGET_SECONDS,
        on_progress: OnProgress = lambda n_objects: None,
    ) -> Deleted:
        """Delete what the tombstone covers, here and on all servers of the store. Blocks.

        After `seconds`, or if the store is down, the deletion continues in the background: see
        `unreached` in the answer. Nothing that the tombstone covers is read or written meanwhile.
        """
        return self.deletions.forget(tombstone, seconds=seconds, on_progress=on_progress)

    def adopt(self, tombstones: Iterable[Tombstone]) -> None:
        """Note deletions from before a start, and run those that the store lacks."""
        self.deletions.adopt(tombstones)

    def tombstones(self) -> list[Tombstone]:
        """Return the deletions that this process and the store know."""
        return self.deletions.forgotten.all()

    def on_tombstone(self, listener: Callable[[Tombstone], None]) -> Callable[[], None]:
        """Call `listener`, in a thread of the store, with each deletion of another server.

        Return a function that removes the listener.
        """
        return self.deletions.on_tombstone(listener)


def open_shared_store(url: str, key: str | None, *, encrypts: bool = True) -> SharedStore:
    """Open the store. A store that is down is used once it is back. Raises StartupError."""
    try:
        seal = new_seal(key, encrypts=encrypts)
        objects = _open_objects(url)
    except ModuleNotFoundError as error:
        raise StartupError(MISSING) from error
    store = SharedStore(objects, seal)
    store.start()
    return store


def is_on_this_machine(url: str) -> bool:
    """Return whether the store's address is a socket of this machine. A bucket's is not."""
    scheme, _, rest = url.partition("://")
    if scheme == "unix":
        return True
    hosts = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")[2].split(",")
    return scheme != S3_SCHEME and all(map(_is_loopback, hosts))


def _is_loopback(address: str) -> bool:
    host = urlsplit(f"//{address}").hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


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
