"""An agent at work: tool rounds through the real server, by a client that rewrites its history."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.support.server_process import ServerProcess, serve
from tests.support.workloads import Client, Message, ReferenceFloor, listing, system, user

MAX_AMPLIFICATION = 1.02
N_ROUNDS = 6  # each way to rewrite arguments is used
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tool to {name} the files of the project.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "maxLength": 24},
                    "mode": {"type": "string", "enum": ["whole", "t\u00eate", "tail"]},
                    "count": {"type": "integer", "minimum": 1, "maximum": 99},
                },
                "required": ["path", "mode", "count"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("read", "search")
]

# Rewrites of arguments by real clients before they send them back.
REWRITES: tuple[Callable[[str], str], ...] = (
    lambda text: json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")),
    lambda text: json.dumps(json.loads(text)),
    lambda text: json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":")),
    lambda text: json.dumps(json.loads(text), ensure_ascii=False, indent=2),
    lambda text: json.dumps(dict(reversed(json.loads(text).items()))),
)


@dataclass
class Account:
    n_prefilled: int = 0
    n_floor: int = 0


class Agent:
    """Asks with OpenAI's SDK, and counts against the floor: a tree of token ids of its own."""

    def __init__(self, server: ServerProcess, floor: ReferenceFloor, account: Account) -> None:
        self._sdk = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)
        self._client = Client(server.url)
        self._floor = floor
        self._account = account

    def close(self) -> None:
        self._sdk.close()
        self._client.close()

    def wait_until_on_disk(self) -> None:
        self._client.wait_until_on_disk()

    def ask(self, history: list[Message], tool_choice: str) -> Any:
        prompt = self._client.chat_prompt(history, TOOLS)
        create: Any = self._sdk.chat.completions.create
        reply = create(
            model="any",
            messages=history,
            tools=TOOLS,
            tool_choice=tool_choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=80,
            logprobs=True,
        )
        [choice] = reply.choices
        story = reply.model_extra["rekindle"]
        assert reply.usage.prompt_tokens == len(prompt)
        # Remembered turns that were found.
        n_turns = sum(span["match"] == "remembered_turn" for span in story["spans"])
        assert (
            n_turns >= story["remembered_turns"] == sum(m["role"] == "assistant" for m in history)
        )
        self._account.n_prefilled += story["prefilled"]
        self._account.n_floor += self._floor.n_new(prompt)
        pieces = [each.token for each in choice.logprobs.content]
        n_rows = len(pieces) - (choice.finish_reason == "length")
        sampled = list(self._client.known_ids(pieces))[:n_rows]
        assert len(sampled) == n_rows, "not every token of the reply is known by its text"
        self._floor.learn([*prompt, *sampled])
        return choice


def returned(choice: Any, number: int) -> tuple[Message, list[Message]]:
    """The reply as the client sends it back, and the results of its calls."""
    message = choice.message
    calls = [
        {
            "id": call.id.replace("_", "") if number % 3 == 0 else call.id,
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": REWRITES[number % len(REWRITES)](call.function.arguments),
            },
        }
        for call in message.tool_calls
    ]
    text = (message.content or "").strip()
    sent = {"role": "assistant", "content": text or None, "tool_calls": calls}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": listing(f"{number}", 3)}
        for call in calls
    ]
    return sent, results


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.long
@pytest.mark.parametrize("is_killed", [False, True], ids=["", "killed in the middle"])
def test_an_agent_computes_each_token_once(
    embedded_model: Path,
    cache: Path,
    is_killed: bool,  # noqa: FBT001
) -> None:
    """The turns are found live, and after the kill on disk."""
    floor, account = ReferenceFloor(), Account()
    history = [system("a careful engineer"), user("Find the bug and say where it is.")]
    rounds = iter(range(N_ROUNDS))
    for n_rounds in (N_ROUNDS // 2, N_ROUNDS - N_ROUNDS // 2):
        for server in _server(cache):
            with closing(Agent(server, floor, account)) as agent:
                for number in _first(rounds, n_rounds):
                    choice = agent.ask(history, "required")
                    assert choice.finish_reason == "tool_calls", choice
                    [call] = choice.message.tool_calls
                    arguments = json.loads(call.function.arguments)
                    assert set(arguments) == {"path", "mode", "count"}
                    sent, results = returned(choice, number)
                    history += [sent, *results]
                if is_killed and n_rounds == N_ROUNDS // 2:
                    agent.wait_until_on_disk()
                    server.process.send_signal(signal.SIGKILL)
                    server.process.wait()
                else:
                    last = agent.ask(history, "auto")
                    assert last.finish_reason in ("stop", "tool_calls", "length")
                    assert server.stop() == 0
    assert account.n_floor <= account.n_prefilled <= MAX_AMPLIFICATION * account.n_floor, account


def _first(rounds: Iterator[int], count: int) -> Iterator[int]:
    for _ in range(count):
        yield next(rounds)


def _server(cache: Path) -> Iterator[ServerProcess]:
    with serve("--parallel", "1", "--cache-dir", str(cache)) as server:
        yield server
