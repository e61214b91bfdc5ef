"""Wait for a signal in the event loop."""

import asyncio
import signal
from collections.abc import Iterable

ENDING = (signal.SIGINT, signal.SIGTERM)


def first_signal(numbers: Iterable[signal.Signals]) -> "asyncio.Future[signal.Signals]":
    """Return a future of the first of these signals. Until the loop ends, none has its default."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()

    def receive(number: signal.Signals) -> None:
        if not received.done():
            received.set_result(number)

    for number in numbers:
        loop.add_signal_handler(number, receive, number)
    return received
