"""Frames on a socket: four bytes of length, then one message."""

import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

_LENGTH = struct.Struct(">I")
HEADER_BYTES = _LENGTH.size


def framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


class FrameBuffer:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        is_whole = (
            len(data) > HEADER_BYTES and _LENGTH.unpack_from(data)[0] == len(data) - HEADER_BYTES
        )
        if is_whole and not self._buffer:
            yield data[HEADER_BYTES:]  # the usual case: one step
            return
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= HEADER_BYTES:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                stop = start + HEADER_BYTES + length
                if len(self._buffer) < stop:
                    return
                message = bytes(memoryview(self._buffer)[start + HEADER_BYTES : stop])
                start = stop
                yield message
        finally:
            del self._buffer[:start]


def can_receive(sock: socket.socket, seconds: float) -> bool:
    """Wait for the other side. Return whether it has sent something, or closed the socket."""
    poller = select.poll()  # `select` refuses descriptors over 1,023
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def receive(sock: socket.socket) -> bytes | None:
    """Return the next message; None: the other side has closed the socket. Blocks."""
    header = _read(sock, HEADER_BYTES)
    if header is None:
        return None
    (length,) = _LENGTH.unpack(header)
    return _read(sock, length)


def _read(sock: socket.socket, n_bytes: int) -> bytes | None:
    data = bytearray(n_bytes)
    view, n_read = memoryview(data), 0
    while n_read < n_bytes:
        try:
            count = sock.recv_into(view[n_read:])
        except ConnectionError:
            return None
        if not count:
            return None
        n_read += count
    return bytes(data)


class FrameSender:
    """Sends messages from any thread without waiting for the reader.

    A separate thread sends the bytes that the kernel does not take at once.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._backlog: deque[memoryview] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._drain, name="link-writer", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> None:
        """Queue the message. Harmless after the other side has closed the socket."""
        data = framed(message)
        with self._lock:
            if self._is_closed:
                return
            n_sent = 0
            if not self._backlog:
                # The thread tries again, and notices a closed link.
                with suppress(BlockingIOError, ConnectionError):
                    n_sent = self._sock.send(data, socket.MSG_DONTWAIT)
                if n_sent == len(data):
                    return
            self._backlog.append(memoryview(data)[n_sent:])
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Wait until everything is sent, but not longer than `seconds`."""
        with self._lock:
            self._changed.wait_for(lambda: not self._backlog or self._is_closed, seconds)
            self._is_closed = True
            self._changed.notify_all()

    def _drain(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._backlog or self._is_closed)
                if self._is_closed:
                    return
                data = self._backlog[0]
            try:
                self._sock.sendall(data)
            except OSError:
                with self._lock:
                    self._is_closed = True
                    self._backlog.clear()
                    self._changed.notify_all()
                return
            with self._lock:
                self._backlog.popleft()
                self._changed.notify_all()
