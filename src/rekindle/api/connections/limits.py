"""Bounds of one server's connections, and the connections that count against them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

MAX_HEAD_BYTES = 64 * 1024  # request line and headers; real clients send 1 to 4 KiB
MAX_HEADERS = 100
MAX_PIPELINED = 64  # requests of one connection that wait for the reply to an earlier one
LINGER_SECONDS = 2.0  # for a refused client to read why; picked
SPARE_CONNECTIONS = 64  # beyond the limit: waiting connections, and checks of /health


class WaitingConnection(Protocol):
    def evict(self) -> None:
        """Close the connection, because there are too many."""


@dataclass(slots=True)
class OpenConnections:
    """Connections of one server. Only the event loop uses it."""

    max_running: int
    receive_seconds: float  # for a head to arrive
    on_refused: Callable[[int], None]  # with the status
    running: set[WaitingConnection] = field(default_factory=set)
    waiting: dict[WaitingConnection, None] = field(default_factory=dict)  # longest first

    def may_run(self, connection: WaitingConnection) -> bool:
        return connection in self.running or len(self.running) < self.max_running

    def open(self, connection: WaitingConnection) -> bool:
        """Add a connection, in the place of the one that waits longest if there are too many.

        Return False if none waits.
        """
        n_open = len(self.running) + len(self.waiting)
        if n_open >= self.max_running + SPARE_CONNECTIONS:
            if not self.waiting:
                return False
            longest = next(iter(self.waiting))
            del self.waiting[longest]
            longest.evict()
        self.waiting[connection] = None
        return True

    def run(self, connection: WaitingConnection) -> None:
        self.waiting.pop(connection, None)
        self.running.add(connection)

    def wait(self, connection: WaitingConnection) -> None:
        self.close(connection)
        self.waiting[connection] = None

    def close(self, connection: WaitingConnection) -> None:
        self.running.discard(connection)
        self.waiting.pop(connection, None)
