"""The warm list: files that a server primes at its start, and again when they change.

One asyncio task checks the files every two seconds, and primes one request at a time. The
engine queues it like any other request.
"""

import asyncio
import glob
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp

from rekindle.bounded_file import read_file
from rekindle.errors import Overloaded, PrimeError, UnreadableFile
from rekindle.priming.files import MAX_BYTES, PrimeRequest, is_prime_file, parse_prime_file
from rekindle.priming.stream import Primed, outcome_of, refusal_in

_log = logging.getLogger(__name__)

POLL_SECONDS = 2.0  # picked
OVERLOADED_STATUSES = (429, 529)  # OpenAI's and Anthropic's

Send = Callable[[PrimeRequest], Awaitable[Primed]]  # raises PrimeError; Overloaded: retry later
Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _LastRead:
    """A file when it was last read."""

    stamp: tuple[int, int] | None  # mtime in ns, and bytes; None: it could not be read
    digest: bytes


class WarmList:
    """`paths` are files, folders and globs. Each round looks for their files again."""

    def __init__(
        self,
        paths: Sequence[str],
        send: Send,
        poll_seconds: float = POLL_SECONDS,
        *,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._paths = tuple(paths)
        self._send = send
        self._poll_seconds = poll_seconds
        self._sleep = sleep
        self._seen: dict[Path, _LastRead] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        assert self._task is None
        if not self._paths:
            return
        self._task = asyncio.get_running_loop().create_task(self._run(), name="warm-list")

    async def close(self) -> None:
        """Stop, and cancel the request that runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            await self._prime_changes()
            await self._sleep(self._poll_seconds)

    async def _prime_changes(self) -> None:
        found = await asyncio.to_thread(_expand, self._paths)
        for gone in self._seen.keys() - set(found):
            del self._seen[gone]
        for path in found:
            content = await asyncio.to_thread(self._changed_content, path)
            if content is not None:
                await self._prime(path, content)

    def _changed_content(self, path: Path) -> bytes | None:
        """Return the file's content, or None if it is the same as in the last round."""
        before = self._seen.get(path)
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if before is not None and before.stamp == stamp:
                return None
            content = read_file(path, MAX_BYTES, may_be_pipe=False)
        except (OSError, UnreadableFile) as error:
            if before is None or before.stamp is not None:
                reason = error.message if isinstance(error, UnreadableFile) else error.strerror
                _log.warning("warm list: %s cannot be read: %s", path, reason)
            self._seen[path] = _LastRead(None, b"")
            return None
        digest = hashlib.blake2b(content).digest()
        self._seen[path] = _LastRead(stamp, digest)
        return None if before is not None and before.digest == digest else content

    async def _prime(self, path: Path, content: bytes) -> None:
        try:
            requests = await asyncio.to_thread(parse_prime_file, path, content)
        except (PrimeError, UnreadableFile) as error:
            _log.warning("warm list: %s", error.message)
            return
        for request in requests:
            start = time.monotonic()
            try:
                primed = await self._send_when_there_is_room(request)
            except PrimeError as error:
                _log.warning("warm list: %s was not primed: %s", request.name, error.message)
            except Exception:  # one file must not stop the list
                _log.exception("warm list: %s was not primed", request.name)
            else:
                _log.info(
                    "warm list: %s primed tokens=%d cached=%d computed=%d seconds=%.2f",
                    request.name,
                    primed.n_tokens,
                    primed.n_cached,
                    primed.n_computed,
                    time.monotonic() - start,
                )

    async def _send_when_there_is_room(self, request: PrimeRequest) -> Primed:
        while True:
            try:
                return await self._send(request)
            except Overloaded:
                await self._sleep(self._poll_seconds)


def asgi_sender(app: ASGIApp, api_keys: Sequence[str], *, persist: bool) -> Send:
    """Return a sender that posts to the app in this process, once with each key.

    `persist`: the prompt is stored on disk. A server without a disk cache refuses that.
    """
    headers = [{"Authorization": f"Bearer {key}"} for key in api_keys] or [{}]

    async def send_all(request: PrimeRequest) -> Primed:
        primed = [await send(request, each) for each in headers]
        return Primed(
            n_cached=sum(each.n_cached for each in primed),
            n_computed=sum(each.n_computed for each in primed),
        )

    async def send(request: PrimeRequest, headers: dict[str, str]) -> Primed:
        import httpx  # its import takes 0.1 s, and few servers have a warm list

        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=headers, timeout=None
        ) as client:
            body = {**request.body, "persist": persist}
            response = await client.post(request.path, json=body)
        if response.is_error:
            why = refusal_in(response.content, f"{response.status_code} {response.reason_phrase}")
            if response.status_code in OVERLOADED_STATUSES:
                seconds = int(response.headers.get("retry-after", 1))
                raise Overloaded(why, retry_after_seconds=seconds)
            raise PrimeError(why)
        return outcome_of(response.text.split("\n"))

    return send_all


def _expand(entries: Sequence[str]) -> list[Path]:
    """Return the files that `entries` name. A missing file stays: it may appear later."""
    files: dict[Path, None] = {}
    for entry in entries:
        pattern = Path(entry).expanduser()
        named = [pattern]
        if glob.has_magic(entry) and not pattern.exists():
            named = [Path(match) for match in sorted(glob.glob(str(pattern), recursive=True))]
        for path in named:
            files |= dict.fromkeys(_files_in(path) if path.is_dir() else [path])
    return list(files)


def _files_in(folder: Path) -> list[Path]:
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        _log.warning("warm list: %s cannot be read: %s", folder, error.strerror)
        return []
    return [
        path
        for path in inside
        if is_prime_file(path) and path.is_file() and not path.name.startswith(".")
    ]
