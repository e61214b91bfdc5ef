"""The OpenAPI document says what is served, no more and no less."""

import asyncio
import re
from typing import Any

import httpx
from pydantic import TypeAdapter
from starlette.routing import Route

from rekindle.api.openai.bodies import ChatCompletion, ChatCompletionChunk, Completion
from tests.api.client import app_of, chat, complete
from tests.api.fakes import FakeResponder
from tests.api.openai.test_streams import CALLING, SCORED_CALL, chunks

STREAMING = (
    *("/completions", "/completion", "/infill", "/messages", "/responses", "/events"),
    "streamGenerateContent",
)


async def document() -> tuple[Any, set[tuple[str, str]]]:
    app = app_of(FakeResponder())
    served = {
        (method, route.path.replace(":path}", "}"))
        for route in app.routes
        if isinstance(route, Route) and route.path != "/openapi.json"
        for method in route.methods or ()
    }
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return (await client.get("/openapi.json")).json(), served


def test_every_route_is_described_and_every_description_is_served() -> None:
    openapi, served = asyncio.run(document())
    described = {
        (method.upper(), path)
        for path, operations in openapi["paths"].items()
        for method in operations
    }
    assert described == served


def test_every_reference_leads_somewhere() -> None:
    openapi, _ = asyncio.run(document())
    names = set(re.findall(r"#/components/schemas/(\w+)", str(openapi)))
    assert names <= openapi["components"]["schemas"].keys()


def test_posts_have_bodies_errors_have_a_shape_and_streams_a_media_type() -> None:
    openapi, _ = asyncio.run(document())
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            assert responses.keys() == {"200", "default"}
            error = responses["default"]["content"]["application/json"]["schema"]
            assert error["$ref"].endswith("ErrorBody")
            takes_body = method in ("post", "patch") and not path.endswith(("/load", "/unload"))
            assert ("requestBody" in operation) == takes_body
            streams = "text/event-stream" in responses["200"].get("content", {})
            assert streams == path.endswith(STREAMING)


def test_replies_fit_the_types_that_describe_them() -> None:
    whole, text = TypeAdapter(ChatCompletion), TypeAdapter(Completion)
    chunk = TypeAdapter(ChatCompletionChunk)
    whole.validate_python(chat().json(), extra="forbid")
    whole.validate_python(chat(n=2).json(), extra="forbid")
    text.validate_python(complete().json(), extra="forbid")
    for seen in chunks(chat(stream=True, stream_options={"include_usage": True}).text):
        chunk.validate_python(seen, extra="forbid")
    for script in (CALLING, SCORED_CALL):
        whole.validate_python(chat(FakeResponder(script)).json(), extra="forbid")
        for seen in chunks(chat(FakeResponder(script), stream=True).text):
            chunk.validate_python(seen, extra="forbid")
    for seen in chunks(complete(stream=True).text):
        text.validate_python(seen, extra="forbid")
