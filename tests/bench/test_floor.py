"""The floor after a reply with reasoning or tool calls."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx

from rekindle.replay.client import Changes, Outcome, Server
from rekindle.replay.prompts import FloorCounter
from rekindle.replay.stream import Counts, StreamReader
from rekindle.replay.traffic import ReplayRequest

Body = dict[str, Any]
Render = Callable[[list[Body]], str]
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Look."}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"a":1}'}}
REPLY: Body = {"role": "assistant", "content": None, "tool_calls": [CALL]}
SAID = '<call>ls {"a":1}</call>'  # as it was sampled, and as the template shows it
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "42 files"}


def shown(message: Body) -> str:
    calls = message.get("tool_calls") or ()
    functions = [call["function"] for call in calls]
    text = "".join(f"<call>{each['name']} {each['arguments']}</call>" for each in functions)
    return f"[{message['role']}]{message['content'] or ''}{text}[/]"


def plain(messages: list[Body]) -> str:
    return "".join(map(shown, messages)) + "[assistant]"


def with_thought(messages: list[Body]) -> str:
    return "".join(map(shown, messages)) + "[assistant]<think></think>"


def floors(render: Render, reply: Body, n_reply: int, *later: Body) -> list[int]:
    """Return the floors of a first request, and of the next one with the reply and `later`."""

    def answer(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        text = render(asked["messages"]) if "messages" in asked else asked["content"]
        return httpx.Response(200, json={"tokens": [ord(letter) for letter in text]})

    bodies: list[Body] = [{"messages": [USER]}, {"messages": [USER, reply, *later]}]
    requests = [ReplayRequest(str(n), CHAT, body, (), "", 0) for n, body in enumerate(bodies)]
    counts = Counts(n_reply=n_reply)
    outcomes = [
        Outcome(0, 0.0, 1.0, counts=counts, message=reply),
        Outcome(1, 1.0, 1.0, counts=counts),
    ]

    async def count() -> list[int]:
        server = Server("http://fake", None, Changes(None, None))
        server.http = httpx.AsyncClient(
            transport=httpx.MockTransport(answer), base_url="http://fake"
        )
        counter = FloorCounter(server)
        return [each.n_floor async for each in counter.count(requests, outcomes)]

    return asyncio.run(count())


def test_a_sampled_call_is_not_new_but_the_template_text_after_it_is() -> None:
    first, then = floors(plain, REPLY, len(SAID), RESULT)
    assert first == len(plain([USER]))
    # Its last token was sampled and never computed.
    assert then == 1 + len("[/]" + shown(RESULT) + "[assistant]")


def test_a_reply_rendered_after_other_text_in_history_is_new() -> None:
    reply = {"role": "assistant", "content": "There are 42 of them."}
    question = {"role": "user", "content": "And now?"}
    _, then = floors(with_thought, reply, len(reply["content"]), question)
    assert then == len(reply["content"] + "[/]" + shown(question) + "[assistant]<think></think>")


def test_a_streamed_reply_becomes_the_message_that_a_client_sends_back() -> None:
    reader = StreamReader()
    pieces: list[Body] = [
        {"role": "assistant", "content": None},
        {"reasoning_content": "Hm"},
        {"reasoning_content": "."},
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "ls", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "df", "arguments": "{}"}}]},
    ]
    for delta in pieces:
        reader.feed(f"data: {json.dumps({'choices': [{'delta': delta}]})}")
    other = {"id": "c2", "type": "function", "function": {"name": "df", "arguments": "{}"}}
    assert reader.message() == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [CALL, other],
    }


def test_a_completion_is_no_message() -> None:
    reader = StreamReader()
    reader.feed('data: {"choices": [{"text": "once", "finish_reason": "stop"}]}')
    assert (reader.text, reader.message()) == ("once", None)
