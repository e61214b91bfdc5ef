"""An ObjectStore in memory that counts calls, and fails, hangs or forgets when told to."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rekindle.cache.shared.connection import SharedStore
from rekindle.cache.shared.objects import KEEP_SECONDS
from rekindle.cache.shared.sealing import Authenticated, Encrypted, Seal, Unsealed
from rekindle.errors import StoreUnreachable, TierFailed, TierFull
from rekindle.generation.model_state import Payload

HANG_SECONDS = 10.0  # the longest that a call hangs, so that a test that fails ends
SECRET = bytes(range(32))
PAGE_NAMES = 10
SEALS: dict[str, Seal] = {
    "plain": Unsealed(),
    "mac": Authenticated(SECRET),
    "sealed": Encrypted(SECRET),
}


class MemoryObjects:
    place = "memory://here"

    def __init__(self, *, reads_are_dear: bool = False) -> None:
        self.reads_are_dear = reads_are_dear
        self.objects: dict[str, bytes] = {}
        self.groups: dict[str, set[str]] = {}
        self.calls: Counter[str] = Counter()  # by verb
        self.names_read: list[int] = []  # in each `read`
        self.trouble: TierFailed | None = None  # what every call raises
        self.is_full = False
        self.touched: list[str] = []
        self._may_answer = threading.Event()
        self._may_answer.set()
        self._lock = threading.Lock()

    def fail(self) -> None:
        self.trouble = TierFailed("it failed")

    def die(self) -> None:
        self.trouble = StoreUnreachable("nobody listens")

    def recover(self) -> None:
        self.trouble = None

    @contextmanager
    def hanging(self) -> Iterator[None]:
        self._may_answer.clear()
        try:
            yield
        finally:
            self._may_answer.set()

    def lose(self, *names: str) -> None:
        for name in names:
            self.objects.pop(name, None)
            self.groups.pop(name, None)

    def flip_bit(self, name: str, place: int) -> None:
        data = bytearray(self.objects[name])
        data[place] ^= 1
        self.objects[name] = bytes(data)

    def everything(self) -> bytes:
        """Return everything that a reader of the store can see."""
        texts = [
            *self.objects,
            *self.groups,
            *(each for group in self.groups.values() for each in group),
        ]
        return b"\n".join([*map(str.encode, texts), *self.objects.values()])

    # -- ObjectStore ----------------------------------------------------------------------------

    def read(self, names: Sequence[str], *, max_bytes: int) -> list[bytes | None]:
        self._called("read")
        self.names_read.append(len(names))
        found = [self.objects.get(name) for name in names]
        return [data[:max_bytes] if data is not None else None for data in found]

    def write(self, name: str, parts: Sequence[Payload]) -> None:
        self._called("write")
        if self.is_full:
            raise TierFull("there is no room")
        self.objects[name] = b"".join(parts)

    def overwrite(self, name: str, start: Payload) -> None:
        self._called("overwrite")
        with self._lock:
            self.objects[name] = bytes(start) + self.objects[name][len(start) :]

    def add(self, group: str, member: str, *, keep_seconds: int = KEEP_SECONDS) -> None:
        self._called("add")
        with self._lock:
            self.groups.setdefault(group, set()).add(member)

    def members(self, groups: Sequence[str], *, limit: int) -> list[list[str]]:
        self._called("members")
        return [list(self.groups.get(group, ()))[:limit] for group in groups]

    def touch(self, names: Sequence[str]) -> list[bool]:
        self._called("touch")
        self.touched += names
        return [name in self.objects for name in names]

    def discard(self, group: str, members: Sequence[str]) -> None:
        self._called("discard")
        with self._lock:
            self.groups.get(group, set()).difference_update(members)

    def remove(self, names: Sequence[str]) -> None:
        self._called("remove")
        self.lose(*names)

    def pages(self, kinds: str, folder: str) -> Iterator[list[str]]:
        starts = tuple(f"{kind}/{folder}" for kind in kinds)
        names = [name for name in (*self.objects, *self.groups) if name.startswith(starts)]
        for first in range(0, len(names), PAGE_NAMES):
            self._called("page")
            yield names[first : first + PAGE_NAMES]

    def ping(self) -> None:
        self._called("ping")

    def close(self) -> None:
        pass

    def _called(self, verb: str) -> None:
        with self._lock:
            self.calls[verb] += 1
        self._may_answer.wait(HANG_SECONDS)
        if self.trouble is not None:
            raise self.trouble


def memory_store(objects: MemoryObjects, *, seal: str = "plain") -> SharedStore:
    """Open the store for one server. Several may share the same objects."""
    return SharedStore(objects, SEALS[seal])
