"""The tokens of each prompt, asked from its server, and the floor computed from them.

The requests follow the run and cost no measured time. A server that remembers its replies then
also renders them as in the run.
"""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import httpx

from rekindle.common_prefix import n_common
from rekindle.priming.files import Body
from rekindle.replay.as_chat import as_chat
from rekindle.replay.client import Outcome, Server
from rekindle.replay.floor import UNIT_BYTES, Floor, units_of_text, units_of_tokens
from rekindle.replay.traffic import ReplayRequest

CHARACTERS_PER_TOKEN = 4  # picked: English and code
MERGED_TOKENS = 2  # last tokens of a prompt that may merge with the text after it; picked
IS_MISSING = (404, 405, 501)
PROMPT_FIELDS = (
    *("model", "messages", "tools", "chat_template_kwargs"),
    *("continue_final_message", "add_generation_prompt"),
)


@dataclass(frozen=True, slots=True)
class Counted:
    index: int
    n_floor: int
    is_exact: bool  # the server reports the same number of prompt tokens
    by_characters: bool


class FloorCounter:
    """Counts the floor of one server. Prompts of earlier runs count as known."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._tokens = Floor()
        self._texts = Floor()
        self._missing: set[str] = set()  # endpoints that the server does not have

    async def count(
        self, requests: Sequence[ReplayRequest], outcomes: Sequence[Outcome]
    ) -> AsyncIterator[Counted]:
        """Yield the floor of each answered request, in the order of sending."""
        for outcome in sorted(outcomes, key=lambda each: each.start):
            if outcome.error is None:
                yield await self._count(requests[outcome.index], outcome)

    async def _count(self, request: ReplayRequest, outcome: Outcome) -> Counted:
        tokens = await self._prompt(request)
        if tokens is None:
            return self._count_characters(request, outcome)
        n_floor = self._tokens.n_new(units_of_tokens(tokens))
        said = await self._tokenized(outcome.text) if outcome.text else None
        computed = (said or [])[: _n_computed(outcome)]
        self._tokens.learn(units_of_tokens([*tokens, *computed]))
        self._tokens.learn(await self._as_history(request, outcome, units_of_tokens(tokens)))
        n_prompt = outcome.counts.n_prompt
        is_exact = n_prompt is None or n_prompt == len(tokens)
        return Counted(outcome.index, n_floor, is_exact, by_characters=False)

    def _count_characters(self, request: ReplayRequest, outcome: Outcome) -> Counted:
        text = prompt_text(request)
        units = units_of_text(text)
        n_new = self._texts.n_new(units)
        said = "" if outcome.message is None else json.dumps(outcome.message, ensure_ascii=False)
        self._texts.learn(units + units_of_text(said))
        n_prompt = outcome.counts.n_prompt
        # Characters per token, by the server's own count of this prompt.
        rate = len(units) / UNIT_BYTES / n_prompt if n_prompt else CHARACTERS_PER_TOKEN
        n_floor = max(ceil(n_new / max(rate, 1)), 1)
        return Counted(outcome.index, n_floor, is_exact=False, by_characters=True)

    async def _prompt(self, request: ReplayRequest) -> list[int] | None:
        if request.path == "/v1/completions":
            prompt = request.body.get("prompt")
            return await self._tokenized(prompt) if isinstance(prompt, str) else _ids(prompt)
        chat = as_chat(request)
        if chat is None:
            return None
        chat = {**chat, **self._model_of(request)}
        rendered = await self._post("/apply-template", chat)
        if rendered is None:
            # vLLM has no such endpoint; its /tokenize takes conversations.
            conversation = {name: chat[name] for name in PROMPT_FIELDS if name in chat}
            return _ids((await self._post("/tokenize", conversation) or {}).get("tokens"))
        if (tokens := _ids(rendered.get("tokens"))) is not None:
            return tokens
        text = rendered.get("prompt")
        return await self._tokenized(text) if isinstance(text, str) else None

    async def _as_history(self, request: ReplayRequest, outcome: Outcome, prompt: bytes) -> bytes:
        """Return the prompt with the reply as later prompts render it, up to the reply's end."""
        n_computed = _n_computed(outcome)
        if outcome.message is None or n_computed is None or _goes_on(request.body):
            return b""
        body = {**request.body, "messages": [*request.body["messages"], outcome.message]}
        tokens = await self._prompt(replace(request, body=body))
        if tokens is None:
            return b""
        history = units_of_tokens(tokens)
        n_same = n_common(history, prompt) // UNIT_BYTES
        if n_same < len(prompt) // UNIT_BYTES - MERGED_TOKENS:
            return b""  # the template renders the text before the reply differently
        return history[: (n_same + n_computed) * UNIT_BYTES]

    async def _tokenized(self, text: str) -> list[int] | None:
        body = {"content": text, "add_special": False, "parse_special": True}
        return _ids((await self._post("/tokenize", body) or {}).get("tokens"))

    def _model_of(self, request: ReplayRequest) -> Body:
        body = self._server.body_of(request)
        return {"model": body["model"]} if "model" in body else {}

    async def _post(self, path: str, body: Body) -> dict[str, Any] | None:
        if path in self._missing:
            return None
        try:
            response = await self._server.http.post(path, json=body)
            if response.status_code in IS_MISSING:
                self._missing.add(path)
            answer = response.json() if response.is_success else None
        except (httpx.HTTPError, ValueError):
            return None
        return answer if isinstance(answer, dict) else None


def prompt_text(request: ReplayRequest) -> str:
    """Return the parts of the prompt in order. An estimate: no template is applied."""
    body = as_chat(request) if request.path != "/v1/completions" else None
    body = request.body if body is None else body
    head = [body.get(name) for name in ("tools", "system", "instructions")]
    turns = body.get("messages", body.get("input", body.get("prompt")))
    parts = [*(each for each in head if each), *(turns if isinstance(turns, list) else [turns])]
    return "".join(json.dumps(part, ensure_ascii=False) for part in parts)


def _n_computed(outcome: Outcome) -> int | None:
    """Return the computed tokens of a reply. Its last one is sampled but never decoded."""
    n_reply = outcome.counts.n_reply
    return None if n_reply is None else max(n_reply - 1, 0)


def _goes_on(body: Body) -> bool:
    """Whether the reply continues the last message."""
    return bool(body.get("continue_final_message")) or body.get("add_generation_prompt") is False


def _ids(value: object) -> list[int] | None:
    if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
        return None
    return value
