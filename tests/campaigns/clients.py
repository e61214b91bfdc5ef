"""Replay requests of real agents. Report the cost, and where a prefix was lost.

    python -m tests.campaigns.clients FOLDER [CLIENT ...] [--chat-template FILE]

FOLDER/traces/*.jsonl.gz is sent twice, in order. As recorded: to `rekindle serve`, verbatim, so
that earlier turns are another server's. As replayed: to a server that says what the recorded
upstream said, so that earlier turns come back with whatever each client does to them.

Exits with 1 when a request was not accepted, or a reply was read as something else than was said.
"""
# ruff: noqa: T201

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from rekindle.config.choices import ReasoningHistory
from tests.support import tiny_models
from tests.support.replayed_client import (
    TEMPLATE,
    Body,
    Ids,
    Recorded,
    ScriptedServer,
    first_difference,
    n_shared,
    read_trace,
    serve_script,
    spoken,
    written,
)
from tests.support.server_process import serve
from tests.support.tiny_models import TinyArchitecture, write_tiny_model
from tests.support.tiny_vocabulary import TURN_START
from tests.support.workloads import REQUEST_SECONDS, ReferenceFloor, n_cached_of

ROUTE = "/v1/chat/completions"
CHAT, MESSAGES = "chat", "anthropic"
OTHER_APIS = (MESSAGES, "responses")
N_CELLS = 131072  # the longest recorded prompt has about half of that
N_SLOTS = 4
REPLY_TOKENS = 4  # of requests as recorded: nobody reads them
LIMITS = ("max_tokens", "max_completion_tokens")
SNIPPET_CHARACTERS = 60
# Headers of one connection, which is another one now.
NOT_SENT = {"host", "connection", "content-length", "authorization", "accept-encoding"}


@dataclass(frozen=True, slots=True)
class Received:
    message: Body  # put together from its chunks
    story: dict[str, Any]

    @property
    def call_ids(self) -> list[str]:
        return [call["id"] for call in self.message["tool_calls"]]


class NotAccepted(Exception):
    pass


@dataclass(slots=True)
class Tally:
    name: str
    mode: str
    n_requests: int = 0
    n_accepted: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_prefilled: int = 0
    n_floor: int = 0
    n_spliced: int = 0
    n_returned: int = 0  # turns that stand in a request behind the history they were said to
    n_pairs: int = 0
    n_misses: int = 0
    problems: list[str] = field(default_factory=list)
    above_floor: list[tuple[int, str]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, request: Recorded, prompt: Sequence[int], story: Body, n_floor: int) -> None:
        self.n_accepted += 1
        self.n_prompt += len(prompt)
        self.n_cached += n_cached_of(story)
        self.n_prefilled += story["prefilled"]
        self.n_floor += n_floor
        if n_cached_of(story) + story["prefilled"] != len(prompt):
            self.problems.append(f"{request.client}:{request.seq} counts wrong: {story}")
        if (excess := story["prefilled"] - n_floor) > 0:
            self.above_floor.append((excess, f"seq {request.seq}, {excess} tokens"))

    def add_miss(self, reason: str, example: str) -> None:
        self.n_misses += 1
        self.reasons[reason] += 1
        self.examples.setdefault(reason, example)

    def row(self) -> str:
        share = self.n_cached / max(self.n_prompt, 1)
        turns = f"{self.n_spliced}/{self.n_returned}" if self.mode == "replayed" else "-"
        misses = f"{self.n_misses}/{self.n_pairs}" if self.mode == "replayed" else "-"
        return (
            f"{self.name:<16}{self.mode:<10}{self.n_requests:>5}{self.n_accepted:>9}"
            f"{self.n_prompt:>10}{self.n_cached:>10}{share:>8.1%}{self.n_prefilled:>10}"
            f"{self.n_floor:>9}{self.n_prefilled / max(self.n_floor, 1):>8.3f}"
            f"{turns:>11}{misses:>9}"
        )


TABLE_HEAD = (
    f"{'client':<16}{'mode':<10}{'req':>5}{'accepted':>9}{'prompt':>10}{'cached':>10}"
    f"{'share':>8}{'prefilled':>10}{'floor':>9}{'ratio':>8}{'turns':>11}{'misses':>9}"
)


@dataclass(frozen=True, slots=True)
class Setup:
    model: Path
    template: str
    reasoning_history: ReasoningHistory


@contextmanager
def _serving(setup: Setup) -> Iterator[httpx.Client]:
    with (
        serve(
            *(str(setup.model), "--chat-template", setup.template),
            *("--reasoning-history", setup.reasoning_history.value),
            *("--parallel", str(N_SLOTS), "--ctx-size", str(N_CELLS)),
            # Tokens computed ahead, or because that is faster, would distort the count.
            *("--no-rewarm", "--no-cache-recompute"),
        ) as server,
        httpx.Client(base_url=server.url, timeout=REQUEST_SECONDS) as http,
    ):
        yield http


def as_recorded(name: str, requests: Sequence[Recorded], setup: Setup) -> Tally:
    tally = Tally(name, "recorded")
    floor = ReferenceFloor()
    with _serving(setup) as http:
        for request in requests:
            tally.n_requests += 1
            body = _without_limits(request.body) | {"max_tokens": REPLY_TOKENS}
            try:
                # Before the reply is there: a prompt as the request will find it.
                prompt = _checked(http.post("/apply-template", json=body)).json()["tokens"]
                received = _send(http, request, body)
            except NotAccepted as error:
                tally.problems.append(f"{name}:{request.seq} is not accepted: {error}")
                continue
            tally.add(request, prompt, received.story, floor.n_new(prompt))
            floor.learn(prompt)
    return tally


def through_another_api(name: str, requests: Sequence[Recorded], setup: Setup) -> Tally:
    """Verbatim, but for the length of the reply: whether each is accepted, and what it found."""
    tally = Tally(name, "recorded")
    with _serving(setup) as http:
        for request in requests:
            tally.n_requests += 1
            limit = "max_tokens" if request.api == MESSAGES else "max_output_tokens"
            body = request.body | {limit: REPLY_TOKENS, "stream": False}
            try:
                story = _checked(http.post(request.path, json=body)).json()["rekindle"]
            except NotAccepted as error:
                tally.problems.append(f"{name}:{request.seq} is not accepted: {error}")
                continue
            n_prefilled = story["prefilled"]
            tally.add(request, [0] * (n_cached_of(story) + n_prefilled), story, n_prefilled)
    return tally


def as_replayed(name: str, requests: Sequence[Recorded], setup: Setup) -> Tally:
    with (
        tempfile.TemporaryDirectory() as folder,
        serve_script(
            setup.model,
            Path(folder),
            template=setup.template,
            reasoning_history=setup.reasoning_history,
            n_cells=N_CELLS,
            n_slots=N_SLOTS,
        ) as server,
        httpx.Client(base_url=server.url, timeout=REQUEST_SECONDS) as http,
    ):
        replay = Replay(name, server, http)
        for request in requests:
            replay.send(request)
        return replay.tally


@dataclass(frozen=True, slots=True)
class _Exchange:
    request: Recorded
    prompt: tuple[int, ...]
    reply: tuple[int, ...]


class Replay:
    def __init__(self, name: str, server: ScriptedServer, http: httpx.Client) -> None:
        self.tally = Tally(name, "replayed")
        self._server = server
        self._http = http
        self._floor = ReferenceFloor()
        self._ids = Ids()
        self._said: dict[int, _Exchange] = {}  # by `seq`
        self._histories: set[str] = set()  # that ended with a reply

    def send(self, request: Recorded) -> None:
        tally = self.tally
        tally.n_requests += 1
        reply = self._server.say(request.seq, written(request.reply))
        body = self._ids.put_into(_without_limits(request.body)) | {"seed": request.seq}
        try:
            received = _send(self._http, request, body)
        except NotAccepted as error:
            tally.problems.append(f"{request.client}:{request.seq} is not accepted: {error}")
            return
        self._check_what_was_read(request, received)
        self._ids.learn(request.reply, received.call_ids)
        prompt = self._server.prompt_of(request.seq)
        tally.add(request, prompt, received.story, self._floor.n_new(prompt))
        self._floor.learn(prompt + reply)
        tally.n_spliced += received.story["remembered_turns"]
        histories = list(_histories(request, request.body["messages"]))
        tally.n_returned += sum(history in self._histories for history in histories)
        *_, answered = _histories(request, [*request.body["messages"], request.reply])
        self._histories.add(answered)
        self._said[request.seq] = _Exchange(request, prompt, reply)
        if request.previous in self._said:
            tally.n_pairs += 1
            self._explain_miss(self._said[request.previous], request, prompt)

    def _check_what_was_read(self, request: Recorded, received: Received) -> None:
        said, read = spoken(request.reply), spoken(received.message)
        if said != read:
            self.tally.problems.append(f"{request.client}:{request.seq}: {said} was read as {read}")

    def _explain_miss(self, before: _Exchange, request: Recorded, prompt: Sequence[int]) -> None:
        known = before.prompt + before.reply
        place = n_shared(known, prompt)
        if place == len(known):
            return
        difference = first_difference(before.request, request)
        where = f"seq {before.request.seq} -> {request.seq}, {len(known) - place} of {len(known)}"
        # Tokens may differ in front of what the client changed, and that is another matter.
        is_ours = difference is None or (difference.is_in_reply and place < len(before.prompt))
        if difference is None or is_ours:
            start = max(place - 12, 0)
            texts = [self._server.text_of(each[start : place + 40]) for each in (known, prompt)]
            turn = self._server.text_of(prompt[:place]).count(TURN_START)
            shown = [self._thinks_at(each, place) for each in (known, prompt)]
            reason = (
                "the template leaves out earlier reasoning"
                if shown == [True, False]
                else "the same meaning, other tokens"
            )
            self.tally.add_miss(reason, f"{where}, turn {turn}: {_versus(*texts)}")
            return
        place_name = "" if difference.index is None else f", message {difference.index}"
        self.tally.add_miss(
            f"the client changed {difference.field} of {difference.role}",
            f"{where}{place_name}: {_versus(difference.before, difference.after)}",
        )

    def _thinks_at(self, tokens: Sequence[int], place: int) -> bool:
        """Whether the turn that is going on there begins with reasoning."""
        before, behind = self._server.text_of(tokens[:place]), self._server.text_of(tokens[place:])
        turn = before.rpartition(TURN_START)[2] + behind.partition(TURN_START)[0]
        return turn.removeprefix("assistant\n").startswith("<think>")


def _histories(request: Recorded, messages: Sequence[Body]) -> Iterator[str]:
    """For each assistant message, all up to it."""
    history = json.dumps(request.body.get("tools") or [], sort_keys=True)
    for message in messages:
        one = spoken(message)
        history += one.key
        if one.role == "assistant":
            yield history


def _versus(before: str, after: str) -> str:
    return f"{before[:SNIPPET_CHARACTERS]!r} became {after[:SNIPPET_CHARACTERS]!r}"


def _without_limits(body: Body) -> Body:
    return {name: value for name, value in body.items() if name not in LIMITS}


def _checked(response: httpx.Response) -> httpx.Response:
    if response.status_code != 200:
        response.read()
        raise NotAccepted(f"{response.status_code} {response.text}")
    return response


def _send(http: httpx.Client, request: Recorded, body: Body) -> Received:
    headers = {k: v for k, v in request.headers.items() if k.lower() not in NOT_SENT}
    with http.stream("POST", ROUTE, json=body, headers=headers) as response:
        _checked(response)
        if not body.get("stream"):
            whole = json.loads(response.read())
            message = whole["choices"][0]["message"]
            message["tool_calls"] = message.get("tool_calls") or []
            return Received(message, whole["rekindle"])
        frames = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    if frames[-1:] != ["[DONE]"]:
        raise NotAccepted(f"the stream ended with {frames[-1:]}")
    chunks = [json.loads(frame) for frame in frames[:-1]]
    return Received(_put_together(chunks), chunks[-1]["rekindle"])


def _put_together(chunks: Sequence[Body]) -> Body:
    message: Body = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for part in delta.get("tool_calls") or ():
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(
                    {"id": part["id"], "function": {"name": "", "arguments": ""}}
                )
            function = message["tool_calls"][part["index"]]["function"]
            for name in ("name", "arguments"):
                function[name] += part["function"].get(name) or ""
    return message


def _smallest_model(path: Path) -> Path:
    """Agents' prompts are long, and attention is nearly all of what these models compute."""
    with patch.multiple(tiny_models, N_LAYER=1, N_HEAD=tiny_models.N_HEAD_KV):
        return write_tiny_model(path, TinyArchitecture.LLAMA, context_length=N_CELLS)


def report(tally: Tally) -> None:
    for problem in tally.problems:
        print(f"    PROBLEM {problem[:600]}")
    for reason, count in tally.reasons.most_common():
        print(f"    {count} x {reason}\n        {tally.examples[reason]}")
    if tally.above_floor:
        excess = sum(count for count, _ in tally.above_floor)
        worst = "; ".join(text for _, text in sorted(tally.above_floor, reverse=True)[:3])
        print(f"    {len(tally.above_floor)} requests {excess} tokens above the floor: {worst}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("clients", nargs="*", help="names of traces; without any: all")
    parser.add_argument("--chat-template", help="a file; without it: one like Qwen 3's")
    parser.add_argument("--reasoning-history", default="auto")
    parser.add_argument("--mode", choices=("recorded", "replayed"), help="without it: both")
    options = parser.parse_args()
    paths = sorted((options.folder / "traces").glob("*.jsonl.gz"))
    if options.clients:
        paths = [path for path in paths if path.name.partition(".jsonl")[0] in options.clients]
    if not paths:
        parser.error(f"no traces in {options.folder / 'traces'}")
    modes = {"recorded": as_recorded, "replayed": as_replayed}
    if options.mode:
        modes = {options.mode: modes[options.mode]}
    skipped: Counter[str] = Counter()
    tallies = []
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(
            _smallest_model(Path(folder) / "model.gguf"),
            options.chat_template or TEMPLATE,
            ReasoningHistory(options.reasoning_history),
        )
        for path in paths:
            trace = read_trace(path)
            skipped.update(each.path for each in trace if each.api not in (CHAT, *OTHER_APIS))
            chats = [each for each in trace if each.api == CHAT]
            others = [each for each in trace if each.api in OTHER_APIS]
            runs = [(mode, chats) for mode in modes.values()]
            if "recorded" in modes:
                runs.append((through_another_api, others))
            for mode, requests in runs:
                if not requests:
                    continue
                began = time.monotonic()
                name = requests[0].client
                tally = mode(name, requests, setup)
                print(f"{TABLE_HEAD}\n{tally.row()}  {time.monotonic() - began:.0f} s", flush=True)
                report(tally)
                tallies.append(tally)
    print(f"\n{TABLE_HEAD}")
    for tally in tallies:
        print(tally.row())
    if skipped:
        print("not sent:", ", ".join(f"{api} {n}" for api, n in sorted(skipped.items())))
    return 1 if any(tally.problems for tally in tallies) else 0


if __name__ == "__main__":
    sys.exit(main())
