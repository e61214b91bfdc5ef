"""Events of the engine thread: collected during a step, delivered in one call."""

from collections.abc import Callable

from rekindle.engine.orders import Delivery
from rekindle.errors import RekindleError
from rekindle.generation.events import Embedded, TokenEvent


class Outbox:
    def __init__(self, deliver: Callable[[list[Delivery]], None]) -> None:
        self._deliver = deliver
        self._deliveries: list[Delivery] = []

    def put(self, request_id: str, event: TokenEvent | Embedded | RekindleError) -> None:
        self._deliveries.append((request_id, event))

    def flush(self) -> None:
        if self._deliveries:
            self._deliver(self._deliveries)
            self._deliveries = []
