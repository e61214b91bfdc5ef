"""A request that crashes the engine each time is found and ended, and harms nobody else."""

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import TinyModels
from tests.support.crash_requests import UNIFORM
from tests.support.engine_processes import (
    FAILED,
    RUNNING,
    deaths_by_cause,
    engine_health,
    engines_of,
    wait_for,
)
from tests.support.faults import Faults
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture
from tests.support.wire_replies import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Body, ask
from tests.support.workloads import Client, prose, user

POISON = 77
N_BYSTANDERS = 3
INNOCENT_TOKENS = 4 * tuple(range(110, 130))  # shorter ones are not written
FATAL_DEATHS = 3


@dataclass(frozen=True, slots=True)
class Setup:
    server: ServerProcess
    faults: Faults
    client: Client
    http: httpx.Client
    cache: Path

    def n_deaths(self) -> int:
        return sum(deaths_by_cause(self.server.url).values())


@pytest.fixture
def setup(tiny_models: TinyModels, tmp_path: Path) -> Iterator[Setup]:
    faults, cache = Faults(tmp_path / "faults"), tmp_path / "cache"
    model = str(tiny_models(TinyArchitecture.LLAMA))
    arguments = ("--parallel", "4", "--ctx-size", "16384", "--cache-dir", str(cache))
    with (
        serve(model, *arguments, environment=faults.environment) as server,
        closing(Client(server.url)) as client,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        yield Setup(server, faults, client, http, cache)


def innocent(number: int, *, never: int = POISON) -> Body:
    """A reply that is the same in any company: every token but one is equally likely."""
    return {
        "prompt": [*INNOCENT_TOKENS, 200 + number],
        "max_tokens": 400,
        "logit_bias": {str(never): False},
        "ignore_eos": True,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
        **UNIFORM,
    }


def test_a_prompt_that_crashes_the_engine_is_ended_and_all_others_go_on(setup: Setup) -> None:
    shared = [3 + index % 50 for index in range(600)]
    setup.http.post(COMPLETIONS, json={"prompt": shared, "max_tokens": 1}).raise_for_status()
    bodies = [innocent(number) for number in range(N_BYSTANDERS)]
    undisturbed = [ask(setup.http, COMPLETIONS, body) for body in bodies]
    setup.client.wait_until_on_disk()
    setup.faults.abort_on(POISON)
    poisoned = {"prompt": [*shared, POISON, 9], "max_tokens": 4}
    with ThreadPoolExecutor(N_BYSTANDERS) as pool:
        beside = [pool.submit(ask, setup.http, COMPLETIONS, body) for body in bodies]
        crashed = setup.http.post(COMPLETIONS, json=poisoned)
        assert [each.result() for each in beside] == undisturbed
    assert crashed.status_code == 500
    assert re.search("engine process died 3 times", crashed.json()["error"]["message"])
    assert deaths_by_cause(setup.server.url) == {"abort": FATAL_DEATHS}
    quarantine = setup.cache / "quarantine"
    wait_for(lambda: any(quarantine.iterdir()), "the entries that it was restored from set aside")

    assert setup.http.post(COMPLETIONS, json=poisoned).status_code == 500
    assert setup.n_deaths() <= FATAL_DEATHS + 1
    n_deaths = setup.n_deaths()
    for _ in range(3):
        assert setup.http.post(COMPLETIONS, json=poisoned).status_code == 500
    assert setup.n_deaths() == n_deaths, "a prompt that is known crashes it again"
    assert ask(setup.http, COMPLETIONS, bodies[0]) == undisturbed[0]
    again = setup.http.post(COMPLETIONS, json={"prompt": shared, "max_tokens": 1})
    assert again.status_code == 200


def poisonous(setup: Setup, text: str) -> tuple[int, str]:
    """Return a token that the greedy reply to the text samples midway, and the text before it."""
    chat = {"messages": [user(text)], "max_tokens": 40, "logprobs": True}
    known = {*setup.client.chat_prompt([user(text)]), *INNOCENT_TOKENS, 200, 201, 202}
    entries = setup.client.post(CHAT, chat)["choices"][0]["logprobs"]["content"]
    pieces = [entry["token"] for entry in entries]
    for at in range(5, len(pieces)):
        tokens = setup.client.tokenize(pieces[at])
        is_new = len(tokens) == 1 and tokens[0] not in known and pieces[at] not in pieces[:at]
        if is_new and pieces[at].isascii() and pieces[at].strip():
            return tokens[0], "".join(pieces[:at])
    raise AssertionError(f"no such token in {pieces}")


STREAMS: dict[str, Body] = {
    CHAT: {"max_tokens": 40, "temperature": 0, "stream": True},
    RESPONSES: {"max_output_tokens": 40, "temperature": 0, "stream": True},
    MESSAGES: {"model": "any", "max_tokens": 40, "temperature": 0, "stream": True},
}


def frames(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_reply_that_crashes_the_engine_midway_ends_with_the_error_of_its_format(
    setup: Setup,
) -> None:
    for number, (route, body) in enumerate(STREAMS.items()):
        setup.faults.clear()
        text = prose(f"poison {number}", 30)
        token, before = poisonous(setup, text)
        setup.faults.abort_on(token)
        asked = {"input": text} if route == RESPONSES else {"messages": [user(text)]}
        beside = innocent(number, never=token)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(ask, setup.http, COMPLETIONS, beside)
            response = setup.http.post(route, json={**body, **asked})
            assert other.result().n_completion == beside["max_tokens"]
        assert response.status_code == 200
        *events, last = frames(response)
        assert "engine process died" in json.dumps(last)
        match route:
            case "/v1/chat/completions":
                told = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
                assert last["error"]["type"] == "server_error"
            case "/v1/responses":
                deltas = [e for e in events if e["type"] == "response.output_text.delta"]
                told = "".join(event["delta"] for event in deltas)
                assert last["type"] == "response.failed"
            case _:
                deltas = [e for e in events if e["type"] == "content_block_delta"]
                told = "".join(event["delta"]["text"] for event in deltas)
                assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        assert told.startswith(before)
        # One more if the token was first computed in a draft: the reply then came closer to it.
        n_deaths = setup.n_deaths()
        assert FATAL_DEATHS * (number + 1) <= n_deaths <= (FATAL_DEATHS + 1) * (number + 1)
        assert engine_health(setup.server.url)["state"] == RUNNING


def test_an_engine_that_dies_at_every_start_is_reported_as_failed_and_recovers(
    setup: Setup,
) -> None:
    endless = {"prompt": [5], "ignore_eos": True, "max_tokens": 10_000, "stream": True}
    asked = {"prompt": [5, 6], "max_tokens": 4, "temperature": 0}
    with setup.http.stream("POST", COMPLETIONS, json=endless) as response:
        lines = response.iter_lines()
        next(lines)
        setup.faults.abort_at_start()
        [engine] = engines_of(setup.server.process.pid)
        os.kill(engine, signal.SIGKILL)
        [*_, error] = [line for line in lines if line.startswith("data: {")]
        assert "error" in json.loads(error.removeprefix("data: "))
    health = httpx.get(f"{setup.server.url}/health")
    assert (health.status_code, health.json()["engine"]["state"]) == (503, FAILED)
    for route, body in (
        (COMPLETIONS, asked),
        (CHAT, {"messages": [user("hi")], "max_tokens": 4}),
        (MESSAGES, {"messages": [user("hi")], "model": "any", "max_tokens": 4}),
        (RESPONSES, {"input": "hi", "max_output_tokens": 16}),
        ("/v1/embeddings", {"input": "hi"}),
    ):
        refusal = setup.http.post(route, json=body)
        assert refusal.status_code == 503, route
        assert int(refusal.headers["retry-after"]) >= 1
    setup.faults.clear()
    # The next start may be half a minute away.
    wait_for(
        lambda: setup.http.post(COMPLETIONS, json=asked).status_code == 200,
        "an answer again",
        seconds=120,
    )
    assert engine_health(setup.server.url)["state"] == RUNNING
