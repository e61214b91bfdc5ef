"""Well-formed HTTP requests with hostile content: every route, headers of callers, early leavers.

Bodies come from three sources: the schemas of `/openapi.json`, requests that agents sent, and
JSON Schemas for grammars.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from rekindle.bench.workloads.recorded import RECORDED
from rekindle.replay.traffic import read_traffic
from tests.campaigns.fuzz.case import Kind, Leave, WireCase
from tests.campaigns.fuzz.grow import hostile
from tests.campaigns.fuzz.grow.hostile import Json
from tests.campaigns.fuzz.grow.schema_bodies import Grower, Operation, operations
from tests.campaigns.fuzz.grow.schemas import grown_schema

LIMITS = {
    "completions": "max_tokens",
    "completion": "n_predict",
    "infill": "n_predict",
    "messages": "max_tokens",
    "responses": "max_output_tokens",
    "lookup": "max_tokens",
}
ENDLESS = "/v1/events"
MAX_TEXT_CHARS = 300  # of a recorded text: a prompt costs most of a request's time
MAX_TOOLS = 2
N_KNOWN = 64
SESSIONS = ("a", "b", "c%20d", "agent/1", "x" * 128, "x" * 129, "%00", "%1b[31m", "\u00e9")
SALTS = ("salt-1", "salt-2", "")
CLASSES = ("main", "background", "ephemeral", "Main", "none")
TOKEN_NAMES = ("x-rekindle-session", "x-session-id", "session-id", "thread-id", "session_id")
# Paths of generating routes come more often than those that read or delete.
RARE = {"/v1/models/{model_id}/unload", "/models/{model_id}/unload"}
RARE_SHARE = 0.02
DELETE_SHARE = 0.2
LIMITED_SHARE = 0.95
HUGE_SHARE = 0.001
IDS = (
    *("user", "prompt_cache_key", "model", "cache_salt", "cache_key", "previous_response_id"),
    *("stop", "reasoning_effort", "instructions", "prompt", "content"),
)
FOREIGN_SHARE = 0.03  # of requests as a page of another site sends them
FOREIGN = (
    *(("host", "evil.example"), ("host", "localhost:1"), ("host", ""), ("host", "[::1]")),
    *(("origin", "https://evil.example"), ("origin", "null"), ("origin", "http://127.0.0.1")),
    *(("sec-fetch-site", "cross-site"), ("sec-fetch-site", "none"), ("referer", "https://x/")),
    *(("content-type", "text/plain"), ("content-type", "multipart/form-data"), ("te", "trailers")),
    *(("content-encoding", "gzip"), ("content-type", "application/json; charset=utf-16")),
)
MANY_REFERENCES = 300


@dataclass(slots=True)
class Known:
    """Ids that the server told: requests refer to them."""

    models: Sequence[str]
    keys: Sequence[str]  # API keys
    responses: deque[str] = field(default_factory=lambda: deque(maxlen=N_KNOWN))
    prefixes: deque[str] = field(default_factory=lambda: deque(maxlen=N_KNOWN))
    contents: deque[str] = field(default_factory=lambda: deque(maxlen=N_KNOWN))


class HttpCases:
    def __init__(self, document: Json, known: Known) -> None:
        self._grower = Grower(document)
        self._operations = operations(document)
        self._posts = [each for each in self._operations if each.schema is not None]
        self._known = known
        self._recorded = [
            (request.path, _shortened(request.body))
            for request in read_traffic([RECORDED]).requests
        ]

    def make(self, kind: Kind, number: int, noise: random.Random) -> WireCase:
        match kind:
            case Kind.SCHEMA:
                return self._from_schema(number, noise)
            case Kind.RECORDED:
                return self._from_recording(number, noise)
            case _:
                return self._with_grammar(number, noise)

    def _from_schema(self, number: int, noise: random.Random) -> WireCase:
        operation = self._choose(noise)
        body = b""
        if operation.schema is not None:
            grown = self._grower.grow(operation.schema, noise)
            self._refer(grown, noise)
            _limit(grown, operation.path, noise)
            for _ in range(noise.choice((0, 0, 1, 1, 1, 2, 3))):
                grown = hostile.mutated(grown, noise)
            _limit_again(grown, operation.path, noise)
            if isinstance(grown, dict):
                _enlarge(grown, noise)
            body = hostile.encoded(grown, noise)
        elif noise.random() < 0.05:
            body = hostile.encoded(hostile.value(noise), noise)
        path = self._filled(operation.path, noise) + _query(operation, noise)
        return self._case(Kind.SCHEMA, number, operation.method.upper(), path, body, noise)

    def _from_recording(self, number: int, noise: random.Random) -> WireCase:
        path, body = noise.choice(self._recorded)
        path, body = _translated(path, dict(body), noise)
        if noise.random() < 0.6:
            body["messages"] = body["messages"][: noise.randrange(1, 12)]
        if path.endswith("responses"):
            body["input"] = body.pop("messages")
        _limit(body, path, noise)
        body["stream"] = noise.random() < 0.5
        for _ in range(noise.choice((0, 1, 1, 2, 4))):
            body = hostile.mutated(body, noise)
        _limit_again(body, path, noise)
        data = hostile.encoded(body, noise)
        return self._case(Kind.RECORDED, number, "POST", path, data, noise)

    def _with_grammar(self, number: int, noise: random.Random) -> WireCase:
        schema = grown_schema(noise)
        messages = [{"role": "user", "content": "Go on."}]
        body: Json = {"messages": messages, "max_tokens": noise.randrange(1, 9)}
        path = "/v1/chat/completions"
        match noise.randrange(5):
            case 0 | 1:
                shape = {"name": "s", "schema": schema}
                body["response_format"] = {"type": "json_schema", "json_schema": shape}
            case 2:
                function = {"name": "f", "parameters": schema}
                body["tools"] = [{"type": "function", "function": function}]
                body["tool_choice"] = noise.choice(("auto", "required", "none"))
            case 3:
                path = "/v1/messages"
                body |= {"model": "m", "tools": [{"name": "f", "input_schema": schema}]}
                body["tool_choice"] = {"type": noise.choice(("auto", "any"))}
            case _:
                path = "/v1/responses"
                shape = {"type": "json_schema", "name": "s", "schema": schema}
                body = {"input": "Go on.", "max_output_tokens": 16, "text": {"format": shape}}
        body["stream"] = noise.random() < 0.5
        if noise.random() < 0.2:
            body = hostile.mutated(body, noise)
        data = hostile.encoded(body, noise)
        return self._case(Kind.GRAMMAR, number, "POST", path, data, noise)

    def _choose(self, noise: random.Random) -> Operation:
        while True:
            operation = noise.choice(self._posts if noise.random() < 0.75 else self._operations)
            share = RARE_SHARE if operation.path in RARE else 1.0
            if operation.method == "delete":
                share = DELETE_SHARE
            if noise.random() < share:
                return operation

    def _refer(self, body: Json, noise: random.Random) -> None:
        """Let a body name stored responses, models and prompts that exist."""
        if not isinstance(body, dict):
            return
        known = self._known
        if known.responses and "previous_response_id" in body:
            body["previous_response_id"] = noise.choice(known.responses)
        if known.responses and isinstance(body.get("input"), list) and noise.random() < 0.2:
            item = {"type": "item_reference", "id": noise.choice(known.responses)}
            body["input"] += [item] * (MANY_REFERENCES if noise.random() < 0.1 else 1)
        if known.contents and "cachedContent" in body:
            body["cachedContent"] = f"cachedContents/{noise.choice(known.contents)}"
        if "model" in body:
            body["model"] = noise.choice((*known.models, *known.models, "unknown"))

    def _filled(self, path: str, noise: random.Random) -> str:
        """Put values in place of the names in braces."""
        known = self._known
        filled = []
        for step in path.split("/"):
            name, colon, verb = step.partition(":")  # Gemini's verbs
            if name == "{model_id}":
                filled.append(self._one_of(known.models, noise) + colon + verb)
            elif step == "{content_id}":
                filled.append(self._one_of(known.contents, noise))
            elif step == "{response_id}":
                filled.append(self._one_of(known.responses, noise))
            elif step == "{key}":
                filled.append(self._one_of(known.prefixes, noise))
            elif step == "{name}":
                filled.append(self._one_of(("app.js", "index.html", "style.css"), noise))
            else:
                filled.append(step)
        return "/".join(filled)

    def _one_of(self, values: Sequence[str], noise: random.Random) -> str:
        if values and noise.random() < 0.7:
            return quote(noise.choice(values), safe="")
        return quote(hostile.text(noise)[:200], safe=noise.choice(("", "/.")))

    def _case(
        self, kind: Kind, number: int, method: str, path: str, body: bytes, noise: random.Random
    ) -> WireCase:
        if noise.random() < 0.02:
            method = noise.choice(("HEAD", "PUT", "PATCH", "OPTIONS", "GET", "POST", "DELETE"))
        leave, leave_bytes = Leave.NEVER, 0
        if path.startswith(ENDLESS):
            leave, leave_bytes = Leave.IN_REPLY, noise.randrange(1, 200)
        elif (chosen := noise.random()) < 0.03:
            leave, leave_bytes = Leave.IN_REQUEST, noise.randrange(1, 400 + len(body))
        elif chosen < 0.08:
            leave, leave_bytes = Leave.IN_REPLY, noise.choice((0, 0, 1, 200, 600, 2_000))
        headers = self._headers(body, noise)
        return WireCase(kind, number, method, path, headers, body, (), leave, leave_bytes)

    def _headers(self, body: bytes, noise: random.Random) -> tuple[tuple[str, str], ...]:
        headers = [("host", "127.0.0.1")]
        if body or noise.random() < 0.5:
            headers.append(("content-type", "application/json"))
        if noise.random() < 0.95:
            key = noise.choice(self._known.keys)
            offered = ("authorization", f"Bearer {key}"), ("x-api-key", key)
            headers.append(noise.choice(offered))
        elif noise.random() < 0.5:
            headers.append(("authorization", f"Bearer {_line(hostile.text(noise))}"))
        if noise.random() < 0.3:
            headers.append((noise.choice(TOKEN_NAMES), noise.choice(SESSIONS)))
        if noise.random() < 0.2:
            headers.append(("x-rekindle-cache-salt", noise.choice(SALTS)))
        if noise.random() < 0.1:
            headers.append(("x-rekindle-class", noise.choice(CLASSES)))
        if noise.random() < 0.1:
            headers.append(("x-request-id", _line(hostile.text(noise))))
        if noise.random() < 0.1:
            name = noise.choice(("accept", "x-rekindle-explain", "user-agent", "anthropic-beta"))
            headers.append((name, _line(hostile.text(noise))))
        if noise.random() < 0.05:
            headers.append(noise.choice(headers))
        if noise.random() < FOREIGN_SHARE:
            name, value = noise.choice(FOREIGN)
            headers = [each for each in headers if each[0] != name] + [(name, value)]
        return tuple(headers)


def _query(operation: Operation, noise: random.Random) -> str:
    if operation.method == "post" or noise.random() < 0.6:
        return ""
    names = ("limit", "order", "after", "start", "model", "session", "scope", "live", "stream")
    pairs = []
    for _ in range(noise.randrange(1, 4)):
        value = noise.choice((hostile.text(noise), "all", "a", 1, -1, 10**30))
        pairs.append(f"{noise.choice(names)}={quote(str(value))}")
    return "?" + "&".join(pairs)


def _enlarge(body: Json, noise: random.Random) -> None:
    """Seldom put megabytes into a list, an object, an id or the arguments of a call."""
    chosen = noise.random()
    if chosen < HUGE_SHARE:
        body[noise.choice((*body, "tools", "messages", "input"))] = hostile.huge(noise)
    elif chosen < 2 * HUGE_SHARE:
        body[noise.choice(IDS)] = hostile.huge_text(noise)
    elif chosen < 3 * HUGE_SHARE:
        body["metadata"] = {"user_id": hostile.huge_text(noise)}
    elif chosen < 4 * HUGE_SHARE:
        sent = noise.choice((hostile.huge_text, hostile.json_text))(noise)
        function = {"name": "f", "arguments": sent}
        calls = [{"id": "1", "type": "function", "function": function}]
        body["messages"] = [{"role": "assistant", "tool_calls": calls}]
        body["input"] = [
            {"type": "function_call", "call_id": "1", **function},
            {"type": "x_call", "call_id": sent[-9000:], "arguments": sent},
        ]


def _limit(body: Json, path: str, noise: random.Random) -> None:
    """Keep replies short."""
    if not isinstance(body, dict):
        return
    if path.endswith("enerateContent"):
        body["generationConfig"] = {"maxOutputTokens": noise.choice((0, 1, 2, 4, 8, 16))}
        return
    if path.startswith("/api/"):
        _limit_ollama(body, noise)
        return
    name = LIMITS.get(path.rpartition("/")[2])
    if name is None:
        return
    for other in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"):
        body.pop(other, None)
    body[name] = noise.choice((0, 1, 2, 4, 8, 16))
    if isinstance(body.get("n"), int):
        body["n"] = noise.choice((1, 1, 2, 4))


def _limit_again(body: Json, path: str, noise: random.Random) -> None:
    """Limit most replies whose limit a mutation has removed: long ones cost most of the time."""
    if noise.random() < LIMITED_SHARE and isinstance(body, dict):
        name = LIMITS.get(path.rpartition("/")[2])
        if name is not None and body.get(name) is None:
            body[name] = 4


def _limit_ollama(body: Json, noise: random.Random) -> None:
    """Keep replies short, and most models loaded."""
    options = body.get("options")
    if isinstance(options, dict):
        options["num_predict"] = noise.choice((1, 2, 4, 8, 16))
    elif "messages" in body or "prompt" in body:
        body["options"] = {"num_predict": 4}
    if noise.random() > RARE_SHARE:
        body.pop("keep_alive", None)


def _translated(path: str, body: Json, noise: random.Random) -> tuple[str, Json]:
    """Send a recorded chat to the routes of other wire formats as well."""
    new = noise.choice((path, path, "/v1/messages", "/v1/responses", "/v1/cache/lookup"))
    if new == "/v1/messages":
        plain = [each for each in body["messages"] if isinstance(each.get("content"), str)]
        roles = [each for each in plain if each["role"] in ("user", "assistant")]
        return new, {"model": "m", "messages": roles or [{"role": "user", "content": "x"}]}
    return new, body


def _shortened(body: Json) -> Json:
    messages = [
        {**each, "content": each["content"][:MAX_TEXT_CHARS]}
        if isinstance(each.get("content"), str)
        else each
        for each in body["messages"]
    ]
    tools = {"tools": body["tools"][:MAX_TOOLS]} if "tools" in body else {}
    return {**body, "messages": messages, **tools}


def _line(text: str) -> str:
    """Keep the characters that a header may have: others belong to `raw_http`."""
    return "".join(each for each in text if " " <= each != "\x7f")[:500]
