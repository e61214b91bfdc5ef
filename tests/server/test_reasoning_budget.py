"""A budget of reasoning tokens, through the real server in every wire format."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import ServerProcess, serve

# ChatML whose prompt opens the reasoning, unless thinking is turned off.
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% else %}{{ '<think>\n' }}{% endif %}{% endif %}"
)
QUESTION = "Tell me a long story about a ship."
BUDGET = 6
MAX_TOKENS = 30
MAX_MARK = 8  # tokens of the closing mark, in any vocabulary
MESSAGES = [{"role": "user", "content": QUESTION}]
CHAT = {"messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 0}


@pytest.fixture(scope="module")
def server(embedded_model: Path) -> Iterator[ServerProcess]:
    with serve("--chat-template", TEMPLATE) as process:
        yield process


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(f"{server.url}{path}", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def chat(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    return post(server, "/v1/chat/completions", {**CHAT, **fields})


def n_reasoning(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["completion_tokens_details"]["reasoning_tokens"])


def test_without_a_budget_the_reasoning_goes_on(server: ServerProcess) -> None:
    reply = chat(server)
    assert n_reasoning(reply) > BUDGET + MAX_MARK
    assert n_reasoning(reply) == reply["rekindle"]["reasoning_tokens"]


def test_reasoning_is_closed_at_the_budget_in_every_wire_format(server: ServerProcess) -> None:
    replied = chat(server, reasoning_budget=BUDGET)
    counts = [n_reasoning(replied), n_reasoning(chat(server, reasoning={"max_tokens": BUDGET}))]
    thinking = {"type": "enabled", "budget_tokens": BUDGET}
    message = post(server, "/v1/messages", {**CHAT, "thinking": thinking})
    assert message["content"][0]["type"] == "thinking"
    counts.append(message["rekindle"]["reasoning_tokens"])
    asked = {"input": QUESTION, "max_output_tokens": MAX_TOKENS, "temperature": 0}
    response = post(server, "/v1/responses", {**asked, "reasoning": {"max_tokens": BUDGET}})
    counts.append(response["usage"]["output_tokens_details"]["reasoning_tokens"])
    assert set(counts) == {counts[0]}
    assert BUDGET < counts[0] <= BUDGET + MAX_MARK
    assert replied["choices"][0]["message"]["reasoning_content"]


def test_a_budget_of_0_is_the_prompt_without_thinking(server: ServerProcess) -> None:
    off = chat(server, enable_thinking=False)
    reply = chat(server, reasoning_budget=0)
    assert reply["usage"]["prompt_tokens"] == off["usage"]["prompt_tokens"]
    assert n_reasoning(reply) == 0
    closed = chat(server, reasoning_budget=0, enable_thinking=True)
    assert closed["usage"]["prompt_tokens"] < off["usage"]["prompt_tokens"]
    assert 0 < n_reasoning(closed) <= MAX_MARK


@pytest.mark.usefixtures("embedded_model")
def test_the_servers_budget_bounds_every_request() -> None:
    with serve("--chat-template", TEMPLATE, "--reasoning-budget", str(BUDGET)) as server:
        expected = n_reasoning(chat(server))
        assert BUDGET < expected <= BUDGET + MAX_MARK
        assert n_reasoning(chat(server, reasoning_budget=1000)) == expected
        assert n_reasoning(chat(server, reasoning_budget=2)) == expected - BUDGET + 2
