"""What the engine thread has to say: collected in a step, delivered in one call."""

from collections.abc import Callable

from rekindle.engine.orders import Delivery
from rekindle.errors import RekindleError
from rekindle.generation.events import Embedded, TokenEvent


class Outbox:
    def __init__(self, deliver: Callable[[list[Delivery]], None]) -> None:
        self._deliver = deliver
        self._deliveries: list[Delivery] = []

    def put(self, to: str, news: TokenEvent | Embedded | RekindleError) -> None:
        self._deliveries.append((to, news))

    def flush(self) -> None:
        if self._deliveries:
            self._deliver(self._deliveries)
            self._deliveries = []
