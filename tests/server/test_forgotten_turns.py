"""A server that has forgotten the turns of a conversation builds a prompt that says the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.llama.model import VocabularyFile
from tests.campaigns.clients import ROUTE
from tests.conftest import TinyModels
from tests.support.prompt_meaning import SaidTurn, meaning, turns
from tests.support.replayed_client import TEMPLATE, ScriptedServer, serve_script, written
from tests.support.tiny_models import TinyArchitecture
from tests.support.workloads import SEARCH_TOOL, Message, listing, system, user

KEEPING = TEMPLATE.replace(" and loop.index0 > ns.last", "")
SWITCHED = TEMPLATE.replace("loop.index0 > ns.last", "(preserve_thinking or loop.index0 > ns.last)")
OTHER = 1000  # added to the seed of a request to the server without these turns


class Agent:
    """Works in tool loops, drops reasoning, and writes the JSON of its calls anew."""

    def __init__(self, server: ScriptedServer, http: httpx.Client) -> None:
        self._server = server
        self._http = http
        self.messages: list[Message] = [system("a careful engineer", 8)]
        self.n_requests = 0
        self.n_prefilled = 0

    def ask(self, text: str, *, n_rounds: int) -> None:
        self.messages.append(user(text))
        for _ in range(n_rounds):
            self._send(self._reply(has_call=True))
        self._send(self._reply(has_call=False))

    def repeat(self, **fields: Any) -> int:
        """Send the last request again, and return its seed."""
        seed = self.n_requests + OTHER
        self._server.say(seed, "So.")
        self._post(seed, fields)
        return seed

    def _reply(self, *, has_call: bool) -> Message:
        number = self.n_requests + 1
        reply: Message = {
            "role": "assistant",
            "content": f"Step {number}. ",
            "reasoning_content": "Hm. " * 9,
        }
        if has_call:
            function = {"name": "search", "arguments": f'{{ "pattern":  "p{number}"}}'}
            reply["tool_calls"] = [{"id": "", "type": "function", "function": function}]
        return reply

    def _send(self, reply: Message) -> None:
        self.n_requests += 1
        self._server.say(self.n_requests, written(reply))
        self.asked = list(self.messages)
        answer = self._post(self.n_requests, {})
        assert answer["message"]["reasoning_content"].strip()
        sent: Message = {
            "role": "assistant",
            "content": (answer["message"]["content"] or "").strip(),
        }
        results = []
        for call in answer["message"].get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
            sent.setdefault("tool_calls", []).append(call)
            content = listing(call["id"], 2)
            results.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        self.messages += [sent, *results]

    def _post(self, seed: int, fields: dict[str, Any]) -> Any:
        body = {"model": "any", "messages": self.asked, "tools": [SEARCH_TOOL], "seed": seed}
        response = self._http.post(ROUTE, json=body | fields)
        response.raise_for_status()
        self.n_prefilled += response.json()["rekindle"]["prefilled"]
        return response.json()["choices"][0]


@pytest.mark.parametrize("template", [TEMPLATE, KEEPING, SWITCHED])
def test_a_server_without_the_turns_builds_a_prompt_that_says_the_same(
    tiny_models: TinyModels, tmp_path: Path, template: str
) -> None:
    model = tiny_models(TinyArchitecture.LLAMA)
    vocabulary = VocabularyFile(model).vocabulary
    with (
        serve_script(model, tmp_path, template=template, n_cells=16384, n_slots=2) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        agent = Agent(server, http)
        for text, n_rounds in (("Find the bug.", 2), ("Why?", 0), ("Mend it.", 2)):
            agent.ask(text, n_rounds=n_rounds)
            seed = agent.n_requests
            known, unknown = server.prompt_of(seed), server.prompt_of(agent.repeat(cache_salt="b"))
            has_reasoning = [turn.reasoning != "" for turn in turns(known, vocabulary)]
            n_before = len(has_reasoning) - n_rounds
            assert has_reasoning == [False] * n_before + [True] * n_rounds
            assert not any(turn.reasoning for turn in turns(unknown, vocabulary))
            assert _without_loop(meaning(known, vocabulary), n_before) == _without_loop(
                meaning(unknown, vocabulary), n_before
            )


def test_a_rendered_prompt_shows_no_turns_of_another_namespace(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    model = tiny_models(TinyArchitecture.LLAMA)
    with (
        serve_script(model, tmp_path, template=TEMPLATE, n_cells=16384, n_slots=2) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        agent = Agent(server, http)
        agent.ask("Find the bug.", n_rounds=1)
        body = {"messages": agent.asked, "tools": [SEARCH_TOOL]}
        own = http.post("/apply-template", json=body).json()
        salted = http.post("/apply-template", json=body | {"cache_salt": "b"}).json()
        assert "Hm." in own["prompt"]
        assert "Hm." not in salted["prompt"]


def _without_loop(said: list[str | SaidTurn], n_before: int) -> list[str | SaidTurn]:
    """Leave out the reasoning of turns within the tool loop, which is the last of the prompt."""
    kept = []
    for each in said:
        if isinstance(each, SaidTurn):
            n_before -= 1
            each = replace(each, reasoning="") if n_before < 0 else each
        kept.append(each)
    return kept
