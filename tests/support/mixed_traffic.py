"""Requests of every kind, from several clients at once, no two of them alike.

Each worker sends one request after the other: growing conversations in three wire formats, several
sessions and namespaces, cancelled replies, and invalid requests.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import httpx

from tests.support.workloads import SEARCH_TOOL, assistant, prose, tool_round, user

REQUEST_SECONDS = 120  # a machine under load; nothing is measured here
REPLY_TOKENS = 4
MAX_TURNS = 6  # of one conversation
N_NAMESPACES = 3

Body: TypeAlias = dict[str, Any]
EXPECTED = {200, 400, 404, 405, 413, 422}

PARAMETERS = {"type": "object", "properties": {"pattern": {"type": "string"}}}
ANTHROPIC_TOOL = {"name": "search", "description": "Searches.", "input_schema": PARAMETERS}
RESPONSES_TOOL = {"type": "function", "name": "search", "parameters": PARAMETERS}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}


async def send(url: str, n_requests: int, *, first: int = 0, n_workers: int = 4) -> Counter[str]:
    """Send requests and return how many there were of each kind. Equal arguments send the same."""
    numbers = iter(range(first, first + n_requests))
    kinds: Counter[str] = Counter()

    async def work() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS) as http:
            worker = _Worker(http)
            for number in numbers:
                kinds[await worker.ask(number)] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(n_workers):
            group.create_task(work())
    return kinds


class _Worker:
    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._noise = random.Random()
        self._messages: list[Body] = []
        self._response_id: str | None = None
        self._ways: dict[str, Callable[[str], Awaitable[None]]] = {
            "chat": self._chat,
            "chat, streamed": self._chat_stream,
            "chat with tools": self._chat_with_tools,
            "chat with a schema": self._chat_with_schema,
            "chat, cancelled": self._cancelled,
            "completion": self._completion,
            "completions, two": self._two_completions,
            "response": self._response,
            "response, deleted": self._deleted_response,
            "message": self._message,
            "message, streamed": self._message_stream,
            "embedding": self._embedding,
            "look at the cache": self._look,
            "wrong": self._wrong,
        }

    async def ask(self, number: int) -> str:
        self._noise.seed(number)
        kind = self._noise.choice(list(self._ways))
        await self._ways[kind](f"{number}: {prose(str(number), self._noise.randrange(4, 40))}")
        return kind

    async def _post(self, route: str, body: Body) -> httpx.Response:
        response = await self._http.post(route, json=body, headers=self._headers())
        assert response.status_code in EXPECTED, response.text
        return response

    async def _stream(self, route: str, body: Body) -> None:
        headers = self._headers()
        async with self._http.stream("POST", route, json=body, headers=headers) as response:
            assert response.status_code in EXPECTED
            await response.aread()

    def _headers(self) -> dict[str, str]:
        headers = {"x-rekindle-session": f"session-{self._noise.randrange(2**20)}"}
        if (namespace := self._noise.randrange(4)) < N_NAMESPACES:
            headers["x-rekindle-cache-salt"] = f"salt-{namespace}"
        return headers

    def _next_turn(self, text: str) -> list[Body]:
        if len(self._messages) > 2 * MAX_TURNS:
            self._messages = []
        self._messages.append(user(text))
        return self._messages

    async def _chat(self, text: str) -> None:
        body = {"messages": self._next_turn(text), "max_tokens": REPLY_TOKENS}
        reply = (await self._post("/v1/chat/completions", body)).json()
        self._messages.append(assistant(reply["choices"][0]["message"]["content"] or ""))

    async def _chat_stream(self, text: str) -> None:
        body = {"messages": [user(text)], "max_tokens": REPLY_TOKENS, "stream": True}
        await self._stream("/v1/chat/completions", body)

    async def _chat_with_tools(self, text: str) -> None:
        rounds = tool_round(None, f"call_{self._noise.randrange(2**40)}", text[:20], text)
        body = {"messages": [user(text), *rounds], "tools": [SEARCH_TOOL], "max_tokens": 2}
        await self._post("/v1/chat/completions", body)

    async def _chat_with_schema(self, text: str) -> None:
        shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        body = {"messages": [user(text)], "response_format": shape, "max_tokens": REPLY_TOKENS}
        await self._post("/v1/chat/completions", body)

    async def _cancelled(self, text: str) -> None:
        body = {"messages": [user(text)], "max_tokens": 200, "stream": True, "ignore_eos": True}
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_raw():
                return

    async def _completion(self, text: str) -> None:
        options = {"mode": "implicit", "ttl": "5m"}  # a pin
        body = {"prompt": text, "max_tokens": REPLY_TOKENS, "prompt_cache_options": options}
        await self._post("/v1/completions", body)

    async def _two_completions(self, text: str) -> None:
        body = {"prompt": text, "n": 2, "max_tokens": 2, "cache_key": f"name-{text[:4].strip(':')}"}
        await self._post("/v1/completions", body)

    async def _response(self, text: str) -> None:
        body: Body = {"input": text, "max_output_tokens": 16, "tools": [RESPONSES_TOOL]}
        if self._response_id is not None and self._noise.random() < 0.7:
            body["previous_response_id"] = self._response_id
        reply = (await self._post("/v1/responses", body)).json()
        self._response_id = reply.get("id")

    async def _deleted_response(self, text: str) -> None:
        body = {"input": text, "max_output_tokens": 16, "stream": False}
        reply = (await self._post("/v1/responses", body)).json()
        await self._http.delete(f"/v1/responses/{reply['id']}")

    async def _message(self, text: str) -> None:
        system = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
        body = {"system": [system], "messages": [user("go on")], "tools": [ANTHROPIC_TOOL]}
        await self._post("/v1/messages", {**body, "model": "any", "max_tokens": REPLY_TOKENS})

    async def _message_stream(self, text: str) -> None:
        body = {"messages": [user(text)], "model": text[:9], "max_tokens": REPLY_TOKENS}
        await self._stream("/v1/messages", {**body, "stream": True})

    async def _embedding(self, text: str) -> None:
        await self._post("/v1/embeddings", {"input": text})

    async def _look(self, text: str) -> None:
        await self._post("/v1/cache/lookup", {"messages": [user(text)]})
        for route in ("/v1/cache", "/v1/sessions", "/metrics", "/slots"):
            await self._http.get(route)

    async def _wrong(self, text: str) -> None:
        number = text.partition(":")[0]
        await self._post("/v1/chat/completions", {"messages": text})
        unknown = {"messages": [user("x")], "max_tokens": 1, f"field_{number}": 1}
        await self._post("/v1/chat/completions", unknown)
        await self._post(f"/v1/{number}", {})
        await self._http.get(f"/v1/responses/resp_{number}")
        await self._http.post("/v1/messages", content=b"{" + text.encode())
