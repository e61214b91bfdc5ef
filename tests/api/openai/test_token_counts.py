"""The tokens of a prompt, counted without computing it."""

import asyncio
from typing import Any

import pytest

from tests.api.client import USER, client_of
from tests.api.fakes import FakeResponder

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("prefix", ["/v1", ""])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [USER]}),
        ("/responses", {"input": "hi", "instructions": "Be brief.", "store": False}),
        ("/responses", {"input": "hi", "tools": [TOOL]}),
    ],
)
def test_the_count_is_that_of_the_replys_prompt(
    prefix: str, path: str, body: dict[str, Any]
) -> None:
    responder = FakeResponder()

    async def run() -> tuple[dict[str, Any], int]:
        async with client_of(responder) as client:
            counted = await client.post(f"{prefix}{path}/input_tokens", json=body)
            n_started = len(responder.started)
            assert (await client.post(f"{prefix}{path}", json=body)).status_code == 200
            return counted.json(), n_started

    counted, n_started = asyncio.run(run())
    prompt = responder.started[0].prompt
    assert counted == {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}
    assert n_started == 0


def test_a_wrong_request_is_not_counted() -> None:
    async def run() -> tuple[int, str]:
        async with client_of(FakeResponder()) as client:
            reply = await client.post("/v1/chat/completions/input_tokens", json={"messages": 1})
            return reply.status_code, reply.json()["error"]["param"]

    assert asyncio.run(run()) == (400, "messages")
