"""A client that sends any bytes, leaves when it is told to, and reads replies as they come."""

import asyncio
import contextlib
from dataclasses import dataclass

from tests.campaigns.fuzz.case import Leave, WireCase

# A machine under load. A request that takes longer hangs.
REPLY_SECONDS = 240.0
RAW_SECONDS = 0.15  # to wait for a reply to bytes that may deserve none; picked
LEAVE_SECONDS = 0.3  # a client that leaves in the reply waits no longer for its bytes; picked
PIECE_SECONDS = 0.002
MAX_REPLY_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip()


class Broken(Exception):
    """The server closed the connection, or sent something that is not HTTP."""


class Closed(Broken):
    """The server closed the connection without a word."""


class Hung(Exception):
    """No reply came in time."""


class Connection:
    """One client with one connection at a time, kept open between requests where possible."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, case: WireCase) -> Answer | None:
        """Return the reply. None: the client left, or the bytes got no reply."""
        if case.pieces or case.leave is not Leave.NEVER:
            return await self._ask_once(case)
        was_open = self._streams is not None
        try:
            return await self._ask_whole(case)
        except (Broken, ConnectionError, asyncio.IncompleteReadError):
            await self.close()
            if not was_open:
                raise
        return await self._ask_whole(case)  # the server had closed the idle connection

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            with contextlib.suppress(ConnectionError):
                await self._streams[1].wait_closed()
            self._streams = None

    async def _ask_whole(self, case: WireCase) -> Answer:
        if self._streams is None:
            self._streams = await self._connected()
        reader, writer = self._streams
        try:
            async with asyncio.timeout(REPLY_SECONDS):
                writer.write(case.wire())
                answer = await read_answer(reader, has_body=case.method != "HEAD")
        except TimeoutError:
            await self.close()
            raise Hung from None
        if answer.headers.get("connection", "").lower() == "close":
            await self.close()
        return answer

    async def _ask_once(self, case: WireCase) -> Answer | None:
        reader, writer = await self._connected()
        try:
            # The server may refuse and close before it has read everything.
            with contextlib.suppress(ConnectionError):
                await self._send(writer, case)
            if case.leave is Leave.IN_REQUEST:
                return None
            if case.leave is Leave.IN_REPLY:
                await _read_some(reader, case.leave_bytes)
                return None
            async with asyncio.timeout(RAW_SECONDS if case.pieces else REPLY_SECONDS):
                return await read_answer(reader, has_body=case.method != "HEAD")
        except TimeoutError:
            if case.pieces:
                return None  # half a request; the server has a deadline of its own
            raise Hung from None
        except (Closed, ConnectionError, asyncio.IncompleteReadError):
            if case.pieces:
                return None
            raise
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _send(self, writer: asyncio.StreamWriter, case: WireCase) -> None:
        data = case.wire()
        if case.leave is Leave.IN_REQUEST:
            writer.write(data[: min(case.leave_bytes, len(data) - 1)])
            await writer.drain()
            return
        for piece in case.pieces or (data,):
            writer.write(piece)
            await writer.drain()
            if len(case.pieces) > 1:
                await asyncio.sleep(PIECE_SECONDS)

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, self._port, limit=MAX_REPLY_BYTES)


async def _read_some(reader: asyncio.StreamReader, n_bytes: int) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, TimeoutError):
        async with asyncio.timeout(LEAVE_SECONDS):
            await reader.readexactly(n_bytes)


async def read_answer(reader: asyncio.StreamReader, *, has_body: bool) -> Answer:
    """Read one reply. Raises Broken if it is not HTTP, or ends early."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            raise Closed("no reply") from error
        raise Broken(f"closed after {error.partial[:100]!r}") from error
    line, *lines = head[:-4].decode("latin-1").split("\r\n")
    version, _, rest = line.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise Broken(f"not a status line: {line[:100]!r}")
    headers = {}
    for each in lines:
        name, colon, value = each.partition(":")
        if not colon:
            raise Broken(f"not a header: {each[:100]!r}")
        headers[name.lower()] = value.strip()
    status = int(rest[:3])
    if status == 100:
        return await read_answer(reader, has_body=has_body)
    if not has_body or status in (204, 304):
        return Answer(status, headers, b"")
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return Answer(status, headers, await _chunked(reader))
    if "content-length" in headers:
        return Answer(status, headers, await reader.readexactly(int(headers["content-length"])))
    return Answer(status, headers, await reader.read(MAX_REPLY_BYTES))


async def _chunked(reader: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        data = await reader.readexactly(size + 2)
        if not size:
            return b"".join(parts)
        parts.append(data[:-2])
