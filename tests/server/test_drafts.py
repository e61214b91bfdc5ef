"""Drafts through a real server: where they come from, who may have them, how to switch them off."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import TinyModels
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture
from tests.support.workloads import prose

# Drafts are tried where measured times say that they pay: not each time on a busy machine.
MOST_TRIES = 6

ANN, BOB = "key-of-ann", "key-of-bob"
ENGINE = ("--ctx-size", "8192", "--parallel", "2", "--threads", "1")
PROMPT = prose("drafts", 60)
LONG = 300  # tokens of a reply: more than a block


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> str:
    return str(tiny_models(TinyArchitecture.LLAMA))


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[ServerProcess]:
    with serve(model, "--api-key", ANN, "--api-key", BOB, *ENGINE) as server:
        yield server


def complete(server: ServerProcess, key: str = ANN, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": LONG, "temperature": 0, "ignore_eos": True, **fields}
    reply = httpx.post(
        f"{server.url}/v1/completions",
        json=body,
        headers={"authorization": f"Bearer {key}"},
        timeout=120,
    )
    assert reply.status_code == 200, reply.text
    whole: dict[str, Any] = reply.json()
    return whole


def drafted(reply: dict[str, Any]) -> dict[str, int]:
    """Return how many tokens were drafted, by source."""
    return {each["source"]: each["tokens"] for each in reply["rekindle"].get("drafts", [])}


def grammar_drafts(reply: dict[str, Any]) -> list[dict[str, int]]:
    """Return the counts of the tokens drafted from a grammar, unless they are few."""
    counts = reply["rekindle"].get("drafts", [])
    return [each for each in counts if each["source"] == "grammar" and each["tokens"] > 10]


def complete_drafted(server: ServerProcess, key: str = ANN, **fields: Any) -> dict[str, Any]:
    """Send the same again until its reply is drafted from the reply before, and return that."""
    for _ in range(MOST_TRIES):
        reply = complete(server, key, **fields)
        if drafted(reply).get("reply"):
            return reply
    raise AssertionError(f"none of {MOST_TRIES} replies was drafted")


def test_a_call_is_drafted_from_its_grammar_and_is_the_same_without_drafts(
    server: ServerProcess,
) -> None:
    parameters = {
        "type": "object",
        "properties": {"directory": {"enum": ["source", "tests"]}},
        "required": ["directory"],
    }
    function = {"name": "list_directory", "parameters": parameters}
    body = {
        "messages": [{"role": "user", "content": "What is in the source directory?"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "cache_prompt": False,
    }

    def call(**fields: Any) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {ANN}"}
        url = f"{server.url}/v1/chat/completions"
        reply = httpx.post(url, json=body | fields, headers=headers, timeout=120)
        assert reply.status_code == 200, reply.text
        whole: dict[str, Any] = reply.json()
        return whole

    plain = call(speculative=False)
    replies = (call() for _ in range(MOST_TRIES))
    drafting, count = next((reply, n) for reply in replies for n in grammar_drafts(reply))
    [made], [same] = (reply["choices"][0]["message"]["tool_calls"] for reply in (drafting, plain))
    assert made["function"] == same["function"]
    assert drafting["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert count["accepted"] == count["tokens"]
    assert "drafts" not in plain["rekindle"]


def test_the_same_prompt_again_is_drafted_from_its_reply(server: ServerProcess) -> None:
    complete(server, prompt=f"again {PROMPT}")
    again = complete_drafted(server, prompt=f"again {PROMPT}")
    timings = again["timings"]
    assert timings["draft_n"] == sum(drafted(again).values())
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]
    assert timings["predicted_n"] == LONG
    metrics = httpx.get(
        f"{server.url}/metrics", headers={"authorization": f"Bearer {ANN}"}, timeout=60
    ).text
    assert 'rekindle_draft_tokens_total{source="reply"}' in metrics


def test_a_draft_never_crosses_from_one_key_to_another(server: ServerProcess) -> None:
    text = f"secret {PROMPT}"
    first = complete(server, ANN, prompt=text)
    spied = complete(server, BOB, prompt=text)
    assert not {"reply", "store"} & set(drafted(spied))
    # What Ann's reply says, in a conversation of Bob's.
    quoted = complete(server, BOB, prompt=first["choices"][0]["text"][:400])
    assert "reply" not in drafted(quoted)
    complete_drafted(server, ANN, prompt=text)


def test_a_request_can_do_without_drafts(server: ServerProcess) -> None:
    text = f"without {PROMPT}"
    complete(server, prompt=text)
    plain = complete(server, prompt=text, speculative=False)
    assert drafted(plain) == {}
    assert "draft_n" not in plain["timings"]
    complete_drafted(server, prompt=text)


def test_an_earlier_reply_is_drafted_after_a_restart_and_not_after_its_deletion(
    model: str, tmp_path: Path
) -> None:
    options = (model, *ENGINE, "--cache-dir", str(tmp_path))

    def first_reply_of_a_process() -> dict[str, Any]:
        with serve(*options) as server:
            reply = complete(server)
            server.wait_until_idle()
            assert server.stop() == 0
            return reply

    first_reply_of_a_process()
    # Later replies of a process could be drafted from the slot: each try is a new process.
    assert any(drafted(first_reply_of_a_process()).get("reply") for _ in range(MOST_TRIES))
    with serve(*options) as server:
        complete(server)
        deleted = httpx.delete(f"{server.url}/v1/cache", params={"scope": "all"}, timeout=60)
        assert deleted.status_code == 200, deleted.text
        assert not {"reply", "store"} & set(drafted(complete(server)))


def test_a_server_without_drafts_says_so(model: str) -> None:
    with serve(model, "--speculate", "off", *ENGINE) as server:
        complete(server)
        assert drafted(complete(server, speculative=True)) == {}
        props = httpx.get(f"{server.url}/props", timeout=60).json()
        assert "--speculate off" in props["rekindle"]["no_drafts_because"]


@pytest.mark.parametrize("architecture", [TinyArchitecture.MAMBA2, TinyArchitecture.QWEN35])
def test_a_model_whose_state_cannot_lose_tokens_says_so(
    architecture: TinyArchitecture, tiny_models: TinyModels
) -> None:
    with serve(str(tiny_models(architecture)), *ENGINE) as server:
        complete(server)
        assert drafted(complete(server)) == {}
        props = httpx.get(f"{server.url}/props", timeout=60).json()
        assert "cannot be removed" in props["rekindle"]["no_drafts_because"]


def test_a_sliding_window_model_drafts_too(tiny_models: TinyModels) -> None:
    with serve(str(tiny_models(TinyArchitecture.GEMMA3)), *ENGINE) as server:
        first = complete(server, max_tokens=600)
        again = complete_drafted(server, max_tokens=600)
        assert again["timings"]["draft_n_accepted"] > 0
        assert len(again["choices"][0]["text"]) > 0
        assert first["usage"]["completion_tokens"] == again["usage"]["completion_tokens"]
