"""Histories as two kinds of clients send them back: the long form is `tests.campaigns.clients`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.campaigns.clients import ROUTE, Replay
from tests.conftest import TinyModels
from tests.support.replayed_client import TEMPLATE, Recorded, serve_script
from tests.support.tiny_models import TinyArchitecture
from tests.support.workloads import SEARCH_TOOL, Message, listing, system, user

REPLIES: list[Message] = [
    {
        "role": "assistant",
        "content": "\n\nI look for it.\n",
        "reasoning_content": "Where is it?",
        "tool_calls": [("call_one1", '{ "pattern": "caf\\u00e9", "limit": 1.0}')],
    },
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [("call_two2", '{\n  "pattern": "b"\n}'), ("call_three3", '{"pattern":"c"}')],
    },
    {"role": "assistant", "content": "It is found. ", "reasoning_content": "Done."},
]


def with_calls(reply: Message, spell: Callable[[str], str], spell_id: Callable[[str], str]) -> Any:
    calls = [
        {
            "id": spell_id(call_id),
            "type": "function",
            "function": {"name": "search", "arguments": spell(arguments)},
        }
        for call_id, arguments in reply.get("tool_calls", ())
    ]
    return reply | {"tool_calls": calls} if calls else reply


def compact(reply: Message) -> Message:
    """JSON.stringify, reasoning and text as they were, an underscore less in each id."""

    def spell(text: str) -> str:
        value = json.loads(text, parse_float=lambda number: int(float(number)))
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    sent: Message = with_calls(reply, spell, lambda call_id: call_id.replace("_", ""))
    return sent


def sorted_and_stripped(reply: Message) -> Message:
    """Keys in order, no white space around the text, no reasoning."""

    def spell(text: str) -> str:
        return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))

    sent: Message = with_calls(reply, spell, lambda call_id: call_id)
    text = (sent["content"] or "").strip()
    return {k: v for k, v in sent.items() if k != "reasoning_content"} | {"content": text}


def conversation(send_back: Callable[[Message], Message]) -> list[Recorded]:
    messages = [system("a careful engineer", 40), user("Find the bug.")]
    requests = []
    for seq, reply in enumerate(REPLIES, start=1):
        said = with_calls(reply, str, str)
        body = {"model": "any", "messages": [*messages], "tools": [SEARCH_TOOL], "stream": True}
        requests.append(Recorded("any", seq, seq - 1 or None, "chat", ROUTE, {}, body, said))
        sent = send_back(reply)
        messages.append(sent)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": listing(call["id"], 2)}
            for call in sent.get("tool_calls", ())
        ]
    return requests


@pytest.mark.parametrize("send_back", [compact, sorted_and_stripped])
def test_turns_are_found_again_in_any_spelling_of_a_client(
    tiny_models: TinyModels, tmp_path: Path, send_back: Callable[[Message], Message]
) -> None:
    model = tiny_models(TinyArchitecture.LLAMA)
    with (
        serve_script(model, tmp_path, template=TEMPLATE, n_cells=8192, n_slots=2) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        replay = Replay("any", server, http)
        for request in conversation(send_back):
            replay.send(request)
    tally = replay.tally
    assert not tally.problems
    assert (tally.n_accepted, tally.n_spliced, tally.n_returned) == (3, 3, 3)
    assert not tally.examples
    assert tally.n_prefilled == tally.n_floor
