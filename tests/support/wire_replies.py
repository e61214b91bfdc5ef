"""Sends a request of any wire format and reads the whole reply, streamed or not, as one value.

A reply with an error, with a gap in its events, or whose deltas disagree with its end raises
`BrokenReply`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import httpx

Body: TypeAlias = dict[str, Any]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
EMBEDDINGS = "/v1/embeddings"


class BrokenReply(Exception):
    """The server answered with an error, or with a stream that is not whole."""


class Call(NamedTuple):
    name: str
    arguments: str


@dataclass(slots=True)
class Choice:
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    finish: str | None = None
    n_logprobs: int = 0


@dataclass(slots=True)
class Reply:
    """What a client sees of a reply, without ids, times and cached tokens."""

    choices: list[Choice] = field(default_factory=list)
    n_prompt: int | None = None
    n_completion: int | None = None
    vectors: list[list[float]] = field(default_factory=list)


def ask(client: httpx.Client, route: str, body: Body) -> Reply:
    if not body.get("stream"):
        response = client.post(route, json=body)
        _check_status(response)
        return _WHOLE[route](response.json())
    with client.stream("POST", route, json=body) as response:
        if response.status_code != httpx.codes.OK:
            response.read()
        _check_status(response)
        return _STREAMED[route](list(_frames(response)))


def _check_status(response: httpx.Response) -> None:
    if response.status_code != httpx.codes.OK:
        raise BrokenReply(f"status {response.status_code}: {response.text[:500]}")


def _frames(response: httpx.Response) -> Iterator[Body]:
    """Yield the data of each event. Comments keep the connection alive."""
    is_done = False
    for line in response.iter_lines():
        if line == "data: [DONE]":
            is_done = True
        elif line.startswith("data: "):
            _require(not is_done, "an event after [DONE]")
            frame = json.loads(line.removeprefix("data: "))
            if "error" in frame or frame.get("type") in ("error", "response.failed"):
                raise BrokenReply(f"an error event: {line[:500]}")
            yield frame
    is_openai = response.url.path in (CHAT, COMPLETIONS)
    _require(is_done == is_openai, "[DONE] is missing" if is_openai else "[DONE] is unexpected")


def _require(fact: bool, complaint: str) -> None:  # noqa: FBT001
    if not fact:
        raise BrokenReply(complaint)


def _completions(frames: list[Body]) -> Reply:
    """Read either kind of completion, in chunks or in one body."""
    reply = Reply()
    arguments: dict[tuple[int, int], list[str]] = {}
    names: dict[tuple[int, int], str] = {}
    choices: dict[int, Choice] = {}
    _require(len({frame["id"] for frame in frames}) == 1, "chunks of two replies")
    for frame in frames:
        for part in frame["choices"]:
            choice = choices.setdefault(part["index"], Choice())
            _require(choice.finish is None, "a chunk after the finish reason")
            message = part.get("delta") or part.get("message") or {"content": part.get("text")}
            choice.text += message.get("content") or ""
            choice.finish = part["finish_reason"]
            choice.n_logprobs += _n_logprobs(part.get("logprobs"))
            for at, call in enumerate(message.get("tool_calls") or ()):
                key = (part["index"], call.get("index", at))
                if "name" in call["function"]:
                    _require(key not in names, "a call that begins twice")
                    names[key] = call["function"]["name"]
                arguments.setdefault(key, []).append(call["function"].get("arguments", ""))
        if frame.get("usage"):
            _require(reply.n_prompt is None, "usage is reported twice")
            reply.n_prompt = frame["usage"]["prompt_tokens"]
            reply.n_completion = frame["usage"]["completion_tokens"]
    for key in sorted(names):
        choices[key[0]].calls.append(Call(names[key], "".join(arguments[key])))
    reply.choices = [choices[index] for index in sorted(choices)]
    _require(all(choice.finish for choice in reply.choices), "a reply without a finish reason")
    _require(reply.n_prompt is not None, "a reply without usage")
    return reply


def _n_logprobs(scores: Body | None) -> int:
    return len((scores or {}).get("content") or (scores or {}).get("tokens") or ())


def _response(frames: list[Body]) -> Reply:
    numbers = [frame["sequence_number"] for frame in frames]
    _require(numbers == list(range(len(frames))), f"sequence numbers {numbers}")
    last = frames[-1]
    _require(last["type"] in ("response.completed", "response.incomplete"), f"ends {last['type']}")
    deltas = [frame for frame in frames if frame["type"] == "response.output_text.delta"]
    whole = _whole_response(last["response"])
    [choice] = whole.choices
    _require("".join(frame["delta"] for frame in deltas) == choice.text, "deltas are another text")
    n_logprobs = sum(len(frame["logprobs"]) for frame in deltas)
    _require(n_logprobs == choice.n_logprobs, f"{n_logprobs} of {choice.n_logprobs} logprobs came")
    return whole


def _whole_response(body: Body) -> Reply:
    choice = Choice(finish=(body["incomplete_details"] or {}).get("reason", body["status"]))
    for item in body["output"]:
        if item["type"] == "function_call":
            choice.calls.append(Call(item["name"], item["arguments"]))
        else:
            for part in item["content"]:
                choice.text += part["text"]
                choice.n_logprobs += len(part["logprobs"])
    usage = body["usage"]
    return Reply([choice], usage["input_tokens"], usage["output_tokens"])


def _message(frames: list[Body]) -> Reply:
    choice = Choice()
    n_prompt = n_completion = None
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for frame in frames:
        match frame["type"]:
            case "content_block_start" if frame["content_block"]["type"] == "tool_use":
                names[frame["index"]] = frame["content_block"]["name"]
                arguments[frame["index"]] = ""
            case "content_block_delta" if "partial_json" in frame["delta"]:
                arguments[frame["index"]] += frame["delta"]["partial_json"]
            case "content_block_delta":
                choice.text += frame["delta"]["text"]
            case "message_delta":
                choice.finish = frame["delta"]["stop_reason"]
                usage = frame["usage"]
                n_prompt, n_completion = _n_input(usage), usage["output_tokens"]
    choice.calls = [Call(names[at], arguments[at]) for at in sorted(names)]
    _require(frames[-1]["type"] == "message_stop", "a message without its end")
    return Reply([choice], n_prompt, n_completion)


def _n_input(usage: Body) -> int:
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(usage[part] for part in parts)


def _embeddings(body: Body) -> Reply:
    vectors = [each["embedding"] for each in body["data"]]
    return Reply(n_prompt=body["usage"]["prompt_tokens"], vectors=vectors)


_WHOLE = {
    CHAT: lambda body: _completions([body]),
    COMPLETIONS: lambda body: _completions([body]),
    RESPONSES: _whole_response,
    EMBEDDINGS: _embeddings,
}
_STREAMED = {
    CHAT: _completions,
    COMPLETIONS: _completions,
    RESPONSES: _response,
    MESSAGES: _message,
}
