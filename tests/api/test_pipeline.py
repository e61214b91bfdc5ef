"""The pipeline on a fifth wire format: one declaration is all that a format needs."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from rekindle.api.body import BodyReader
from rekindle.api.cache_controls import CommonFields
from rekindle.api.errors import answer_rekindle_error
from rekindle.api.http.context import RequestContext
from rekindle.api.http.middleware import RequestScope
from rekindle.api.openapi import Routes
from rekindle.api.pipeline import Exchange, Pipeline, RawPrompt, WireFormat
from rekindle.api.replies import Envelope, Reply
from rekindle.chat.reply.events import ReplyEvent, ReplyOptions, ReplyText
from rekindle.errors import InvalidRequest, Overloaded, RekindleError
from rekindle.observe.telemetry import Telemetry
from tests.api.fakes import CARD, FakeResponder, FixedModels, Script, api_settings


class ShoutRequest(CommonFields):
    say: str


class Shouts:
    """Frames in capitals."""

    def __init__(self, envelope: Envelope) -> None:
        self._id = envelope.id

    def begin(self) -> bytes:
        return f"{self._id[:6]} ".encode()

    def encode(self, index: int, event: ReplyEvent) -> bytes:
        return event.text.upper().encode() if isinstance(event, ReplyText) else b""

    def fail(self, error_body: bytes) -> bytes:
        return b"?"

    def end(self) -> bytes:
        return b"!"


def read(body: ShoutRequest, *_: object) -> Exchange:
    if not body.say:
        raise InvalidRequest("`say` must not be empty.", "say")

    def whole(envelope: Envelope, replies: Sequence[Reply]) -> dict[str, str]:
        return {"model": envelope.model, "said": replies[0].text.upper()}

    return Exchange(
        prompt=[RawPrompt("say", body.say)],
        marks=(),
        ignored=["volume"],
        options=lambda defaults, tokenizer: ReplyOptions(sampling=defaults, max_tokens=3),
        encoder=Shouts,
        whole=whole,
    )


SHOUT = WireFormat(
    name="shout",
    operation="shout",
    paths=("/v1/shout",),
    schema=ShoutRequest,
    body=dict,
    event=dict,
    id_prefix="shout-",
    read=read,
)


def shout(responder: FakeResponder, **fields: Any) -> tuple[httpx.Response, FixedModels, Telemetry]:
    models, telemetry = FixedModels(responder, CARD), Telemetry()
    app = FastAPI(exception_handlers={RekindleError: answer_rekindle_error})
    app.add_middleware(RequestScope, telemetry=telemetry)
    Pipeline(RequestContext(models, telemetry, api_settings(), BodyReader(telemetry))).add_routes(
        Routes(app), SHOUT
    )

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/shout", json={"say": "hi", **fields})

    return asyncio.run(run()), models, telemetry


def test_a_whole_reply_has_the_formats_body_and_the_headers_of_all_formats() -> None:
    responder = FakeResponder()
    reply, models, telemetry = shout(responder, user="ann", cache_key="k")
    assert reply.json() == {"model": "tiny", "said": "HELLO"}
    assert reply.headers["x-rekindle-cache"] == "hit=4/10 from=live"
    assert reply.headers["x-rekindle-session"].startswith("conversation-")
    [started] = responder.started
    assert started.prompt.text == "hi"
    assert started.options.terms.name == "k"
    assert started.options.reply_id is not None
    assert started.options.reply_id.startswith("shout-")
    assert models.n_uses == 0
    assert b'rekindle_ignored_fields_total{field="volume"} 1.0' in telemetry.render()


def test_a_stream_is_what_the_formats_encoder_writes() -> None:
    reply, models, _ = shout(FakeResponder(), stream=True)
    assert reply.text == "shout- HELLO!"
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert models.n_uses == 0


BUSY: Script = (Overloaded("Too many requests wait.", retry_after_seconds=1),)


@pytest.mark.parametrize(
    ("fields", "script", "status"),
    [
        ({"say": ""}, None, 400),
        ({"say": 1}, None, 400),
        ({"persist": True}, None, 400),
        ({}, BUSY, 429),
    ],
)
def test_a_refusal_comes_before_the_stream_and_releases_the_model(
    fields: dict[str, Any], script: Script | None, status: int
) -> None:
    responder = FakeResponder() if script is None else FakeResponder(script)
    reply, models, _ = shout(responder, stream=True, **fields)
    assert reply.status_code == status
    assert reply.json()["error"]["message"]
    assert models.n_uses == 0


def test_priming_generates_nothing_whatever_limit_the_format_reads() -> None:
    responder = FakeResponder()
    shout(responder, prefill=True)
    assert responder.started[0].options.max_tokens == 0
