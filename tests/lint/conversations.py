"""Growing conversations of an agent, as the requests that it sends."""

import json
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

Body = dict[str, Any]
# fmt: off
WORDS = [
    "river", "stone", "lantern", "bridge", "copper", "garden", "signal", "winter",
    "market", "thread", "harbour", "silver", "window", "forest", "engine", "letter",
    "basket", "mirror", "candle", "orchard", "valley", "paper", "shadow", "hammer",
    "ribbon", "kettle", "meadow", "anchor", "velvet", "compass", "saddle", "feather",
    "tunnel", "pebble", "curtain", "ladder",
]
# fmt: on
TOOL_NAMES = ("read_file", "write_file", "run_command", "search_text")


def prose(random: Random, n_words: int) -> str:
    return " ".join(random.choice(WORDS) for _ in range(n_words))


def tool(random: Random, name: str) -> Body:
    parameters = {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": prose(random, 8)},
            "reason": {"type": "string", "description": prose(random, 8)},
        },
        "required": ["path"],
    }
    function = {"name": name, "description": prose(random, 40), "parameters": parameters}
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Agent:
    """A conversation in its final state. Message 0 is the system prompt."""

    tools: list[Body]
    messages: list[Body]
    ends: list[int]  # how many messages each request has

    def requests(self) -> list[Body]:
        return [
            deepcopy({"model": "m", "tools": self.tools, "messages": self.messages[:end]})
            for end in self.ends
        ]


def agent(random: Random, n_rounds: int) -> Agent:
    """Rounds of question, call, result and answer."""
    messages: list[Body] = [{"role": "system", "content": prose(random, 150)}]
    ends = []
    for number in range(n_rounds):
        messages.append({"role": "user", "content": prose(random, 90)})
        ends.append(len(messages))
        arguments = {"path": prose(random, 3), "reason": prose(random, 60)}
        call = {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": random.choice(TOOL_NAMES), "arguments": json.dumps(arguments)},
        }
        messages.append({"role": "assistant", "content": prose(random, 70), "tool_calls": [call]})
        result = {"role": "tool", "tool_call_id": f"call_{number}", "content": prose(random, 90)}
        messages.append(result)
        ends.append(len(messages))
        messages.append({"role": "assistant", "content": prose(random, 80)})
    return Agent([tool(random, name) for name in TOOL_NAMES], messages, ends)
