"""The running replies of one request: one, or `n` for each prompt.

At the end, after an error and when the client disconnects, every stream is closed and the lease
on the model ends.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from fastapi import Request

from rekindle.api.models import Lease
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.events import (
    ReplyCall,
    ReplyDone,
    ReplyEvent,
    ReplyOptions,
    ReplyPart,
    ReplyReasoning,
    ReplyText,
    ScoredToken,
)
from rekindle.chat.reply.stream import ReplyStream
from rekindle.errors import InvalidRequest
from rekindle.observe.telemetry import Telemetry

Sink = Callable[[int, ReplyEvent], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class WantedReply:
    """The prompt and the options of one reply."""

    prompt: Prompt
    options: ReplyOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Facts about the replies of one request that are known before they begin."""

    id: str
    key: str  # the id without its prefix
    created: int  # seconds since the epoch
    model: str
    wanted: Sequence[WantedReply]
    load_seconds: float = 0.0  # that the model took to be ready
    usage_scale: float = 1.0  # of the counts in `usage`


@dataclass(frozen=True, slots=True)
class Reply:
    """One complete reply."""

    parts: tuple[ReplyPart, ...]
    done: ReplyDone

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ReplyText))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ReplyReasoning))

    @property
    def calls(self) -> tuple[ReplyCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ReplyCall))

    @property
    def scored(self) -> tuple[ScoredToken, ...]:
        return tuple(token for part in self.parts for token in part.scored)


class Replies:
    def __init__(self, streams: Sequence[ReplyStream], telemetry: Telemetry, lease: Lease) -> None:
        self._streams = streams
        self._telemetry = telemetry
        self._lease = lease

    async def pour(self, sink: Sink) -> None:
        """Pass every event to `sink` with the index of its reply. All replies run in parallel."""
        tasks = [
            asyncio.create_task(self._pour_one(index, stream, sink))
            for index, stream in enumerate(self._streams)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            self.close()

    async def collect(self) -> list[Reply]:
        events: list[list[ReplyEvent]] = [[] for _ in self._streams]

        async def keep(index: int, event: ReplyEvent) -> None:
            events[index].append(event)

        await self.pour(keep)
        return [_reply(of_one) for of_one in events]

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._lease.end()

    async def _pour_one(self, index: int, stream: ReplyStream, sink: Sink) -> None:
        async for event in stream:
            await sink(index, event)
            if isinstance(event, ReplyDone):
                self._telemetry.count_reply(event.stats)


async def start_replies(
    served: Lease, envelope: Envelope, telemetry: Telemetry, *, request: Request
) -> Replies:
    """Start all replies or none: a refusal closes those that were started before it."""
    responder = served.responder
    status = responder.status()
    n_wanted = len(envelope.wanted)
    if n_wanted > max(status.n_slots, 1) + status.max_waiting:
        raise InvalidRequest(
            f"This request wants {n_wanted} replies, but only {status.n_slots} can run"
            f" and {status.max_waiting} can wait."
        )
    # Clients choose request ids and may repeat one; the engine's must be unique.
    name = f"{request.scope['request_id']}.{secrets.token_hex(3)}"
    streams: list[ReplyStream] = []
    try:
        for index, one in enumerate(envelope.wanted):
            options = replace(one.options, reply_id=envelope.id)
            streams.append(await responder.start(one.prompt, options, request_id=f"{name}.{index}"))
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    return Replies(streams, telemetry, served.share())


def _reply(events: Sequence[ReplyEvent]) -> Reply:
    done = events[-1]
    assert isinstance(done, ReplyDone)
    return Reply(tuple(event for event in events if isinstance(event, ReplyPart)), done)
