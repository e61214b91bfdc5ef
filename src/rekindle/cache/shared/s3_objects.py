"""Objects in S3 or a compatible store. Needs the package `obstore`.

A group is a folder of empty objects. Objects expire only by a lifecycle rule of the bucket, and a
bucket is never full. obstore reads endpoint, region and credentials from the environment:
AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and so on.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import S3Store

from rekindle.cache.shared.objects import KEEP_SECONDS
from rekindle.errors import StartupError, StoreUnreachable, TierFailed
from rekindle.generation.model_state import Payload

if TYPE_CHECKING:
    from obstore import GetOptions

# All of these are picked.
CONNECT_SECONDS = 0.5
ANSWER_SECONDS = 1.0
BODY_SECONDS = 5.0
BACKOFF_SECONDS = 0.05
MAX_RETRIES = 1
MAX_PARALLEL, MAX_UPKEEP = 16, 4
MAX_COMPLAINT_LETTERS = 300
PAGE_NAMES = 1000  # as many as S3 lists or removes at once
QUICK_BYTES = 64 * 1024  # a longer read may take BODY_SECONDS
CHUNK_BYTES = 2**20
MAX_OBJECT_BYTES = 513 * 2**20

_FAILURES = (BaseError, OSError, ValueError)
_NOBODY_LISTENS = ("Connection refused", "dns error")
_SYSTEM_SAID = re.compile(r'message: "([^"]{1,100})"')
_NO_BYTES = "InvalidRange"  # of an empty object
_NO_BUCKET = "NoSuchBucket"  # a FileNotFoundError, like a missing object

Answer = TypeVar("Answer")


class S3Objects:
    reads_are_dear = True

    def __init__(self, url: str) -> None:
        """Connect to nothing yet. Raises StartupError."""
        self.place = url
        self._quick = _new_store(url, seconds=ANSWER_SECONDS)
        self._bodies = _new_store(url, seconds=BODY_SECONDS)
        self._threads = ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="s3")
        # Touches have threads of their own: hundreds of names, and no request waits for them.
        self._upkeep = ThreadPoolExecutor(MAX_UPKEEP, thread_name_prefix="s3-upkeep")

    def read(self, names: Sequence[str], *, max_bytes: int) -> list[bytes | None]:
        return self._all(lambda name: self._read(name, max_bytes), names)

    def write(self, name: str, parts: Sequence[Payload]) -> None:
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._try(lambda: self._bodies.put(name, body, use_multipart=False))

    def overwrite(self, name: str, start: Payload) -> None:
        if (found := self._read(name, MAX_OBJECT_BYTES)) is not None:
            self.write(name, [start, memoryview(found)[len(start) :]])

    def add(self, group: str, member: str, *, keep_seconds: int = KEEP_SECONDS) -> None:
        self._try(lambda: self._quick.put(f"{group}/{member}", b"", use_multipart=False))

    def members(self, groups: Sequence[str], *, limit: int) -> list[list[str]]:
        return self._all(lambda group: self._members(group, limit), groups)

    def touch(self, names: Sequence[str]) -> list[bool]:
        return list(self._upkeep.map(self._is_there, names))

    def discard(self, group: str, members: Sequence[str]) -> None:
        self.remove([f"{group}/{member}" for member in members])

    def remove(self, names: Sequence[str]) -> None:
        for first in range(0, len(names), PAGE_NAMES):
            some = list(names[first : first + PAGE_NAMES])
            self._try(lambda: self._bodies.delete(some))  # noqa: B023

    def pages(self, kinds: str, folder: str) -> Iterator[list[str]]:
        for kind in kinds:
            pages = self._bodies.list(f"{kind}/{folder}", chunk_size=PAGE_NAMES)
            while page := self._try(lambda: next(pages, None)):  # noqa: B023
                yield [each["path"] for each in page]

    def ping(self) -> None:
        self._found(lambda: self._quick.get("ping"))

    def close(self) -> None:
        for pool in (self._threads, self._upkeep):
            pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, name: str, max_bytes: int) -> bytes | None:
        store = self._quick if max_bytes <= QUICK_BYTES else self._bodies
        # Unlike get_range, get accepts a range beyond the end.
        options: GetOptions = {"range": (0, max_bytes)}

        def read() -> bytes:
            try:
                found = store.get(name, options=options)
            except BaseError as error:
                if _NO_BYTES in str(error):
                    return b""
                raise
            # In chunks: a hostile store may send more than was asked for.
            body, n_bytes = [], 0
            for chunk in found.stream(min_chunk_size=CHUNK_BYTES):
                body.append(bytes(chunk))
                n_bytes += len(body[-1])
                if n_bytes >= max_bytes:
                    break
            return b"".join(body)[:max_bytes]

        return self._found(read)

    def _members(self, group: str, limit: int) -> list[str]:
        def names() -> list[str]:
            pages = self._quick.list(f"{group}/", chunk_size=limit)
            return [
                each["path"].rpartition("/")[2]
                for page in islice(pages, 1)
                for each in page[:limit]
            ]

        return self._try(names)

    def _is_there(self, name: str) -> bool:
        return self._found(lambda: self._quick.head(name)) is not None

    def _all(self, ask: Callable[[str], Answer], names: Sequence[str]) -> list[Answer]:
        if len(names) == 1:
            return [ask(names[0])]
        return list(self._threads.map(ask, names))

    def _found(self, call: Callable[[], Answer]) -> Answer | None:
        """Return the call's answer; None if the object is missing."""

        def try_to_find() -> Answer | None:
            try:
                return call()
            except FileNotFoundError as error:
                if _NO_BUCKET in str(error):
                    raise
                return None

        return self._try(try_to_find)

    def _try(self, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except _FAILURES as error:
            text = str(error)
            is_unreachable = any(sign in text for sign in _NOBODY_LISTENS)
            kind = StoreUnreachable if is_unreachable else TierFailed
            raise kind(_complaint(text)) from error


def _new_store(url: str, *, seconds: float) -> S3Store:
    parts = urlsplit(url)
    if not parts.netloc or parts.query or "@" in parts.netloc:
        raise StartupError("The address of a shared store in S3 is s3://bucket/prefix.")
    try:
        return S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            client_options={
                "allow_http": True,
                "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                "timeout": timedelta(seconds=seconds),
            },
            retry_config={
                "max_retries": MAX_RETRIES,
                "retry_timeout": timedelta(seconds=seconds),
                "backoff": {
                    "init_backoff": timedelta(seconds=BACKOFF_SECONDS),
                    "max_backoff": timedelta(seconds=BACKOFF_SECONDS),
                    "base": 2,
                },
            },
        )
    except _FAILURES as error:
        raise StartupError(f"The shared store cannot be used: {_complaint(str(error))}") from error


def _complaint(text: str) -> str:
    """Shorten an obstore error to its first line and the system's own message."""
    head, _, causes = text.partition("\n\n")
    line = " ".join(head.split())[:MAX_COMPLAINT_LETTERS]
    said = _SYSTEM_SAID.search(causes)
    return f"{line}: {said[1]}" if said else line
