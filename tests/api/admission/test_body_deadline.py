"""Deadlines and limits of bodies, where the reply may begin before the body ends."""

import asyncio

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle.api.admission.body_deadline import BodyDeadline
from rekindle.api.admission.body_limit import BodyLimit


async def _streaming(_scope: Scope, receive: Receive, send: Send) -> None:
    """As the event feed: the reply begins at once, and the client is watched meanwhile."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await asyncio.wait_for(receive(), 5)
    await send({"type": "http.response.body", "body": b"all", "more_body": False})


@pytest.mark.parametrize(
    "checked",
    [BodyDeadline(_streaming, pause_seconds=0.01), BodyLimit(_streaming, limit_bytes=2)],
)
def test_a_reply_that_has_begun_is_not_refused(checked: ASGIApp) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.sleep(0.05)
        return {"type": "http.request", "body": b"too much", "more_body": True}

    async def send(message: Message) -> None:
        sent.append(message)

    async def ask() -> None:
        scope = {"type": "http", "method": "GET", "path": "/v1/events", "headers": []}
        await checked(scope, receive, send)

    asyncio.run(ask())
    assert [each.get("status") for each in sent] == [200, None]
