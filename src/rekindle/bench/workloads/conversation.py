"""One client's side of a conversation. Its history grows by the server's own replies."""

import json
from collections.abc import Callable
from typing import Any

from rekindle.bench.stage import Stage
from rekindle.bench.workloads.texts import as_text, tools
from rekindle.priming.files import Body
from rekindle.replay.client import Outcome

REPLY_TOKENS = 20
ACT_TOKENS = 40
# Picked: a call takes up to 50 tokens, and a server that streams calls reserves room for their end.
# llama-server may write text first, up to this limit.
CALL_TOKENS = 224
NO_ANSWER = {"role": "assistant", "content": "(no answer)"}  # put in the history after an error

SENT_BACK = ("role", "content", "reasoning_content", "tool_calls")

Keep = Callable[[Body], Body]


class Chat:
    def __init__(
        self,
        stage: Stage,
        name: str,
        system: str,
        *,
        has_tools: bool = False,
        calls_tools: bool = False,  # by the API; else the system prompt describes them
        keep: Keep = lambda message: message,  # makes the history entry of a reply
    ) -> None:
        self.name = name
        self.messages: list[Body] = []
        self._stage = stage
        self._keep = keep
        self._tools = tools() if calls_tools and stage.calls_tools else []
        if (has_tools or calls_tools) and not self._tools:
            system = f"{system}\n\n{as_text(tools())}"
        self.messages.append({"role": "system", "content": system})

    async def say(self, text: str, *, max_tokens: int = REPLY_TOKENS) -> None:
        self.messages.append({"role": "user", "content": text})
        await self.ask(max_tokens=max_tokens)

    async def act(self, result: str) -> None:
        """Play one round with a tool. Its result goes into the next request."""
        if self._tools:
            await self._call_tool(result)
            return
        await self.ask(max_tokens=ACT_TOKENS)
        self.messages.append({"role": "user", "content": f"Result of the tool:\n{result}"})

    async def _call_tool(self, result: str) -> None:
        choice: Body = {"tool_choice": "required", "parallel_tool_calls": False}
        await self.ask(max_tokens=CALL_TOKENS, **choice)
        calls = self.messages[-1].get("tool_calls") or []
        for call in calls:
            entry = {"role": "tool", "tool_call_id": call["id"], "content": result}
            self.messages.append(entry)
        if not calls:
            self.messages.append({"role": "user", "content": result})

    async def answer(self) -> None:
        """Ask for the final reply in words, without a call."""
        choice: Body = {"tool_choice": "none"} if self._tools else {}
        await self.ask(**choice)

    async def ask(self, *, max_tokens: int = REPLY_TOKENS, **fields: Any) -> Outcome:
        """Send the history and append the reply to it."""
        body: Body = {"messages": list(self.messages), "max_tokens": max_tokens, "temperature": 0}
        if self._tools:
            body["tools"] = self._tools
        else:
            body["ignore_eos"] = True  # the same number of tokens from every server
        n_turns = sum(each["role"] == "assistant" for each in self.messages) + 1
        name = f"{self.name}, turn {n_turns}"
        outcome = await self._stage.send(name, body | fields, self.name)
        reply = NO_ANSWER if outcome.message is None else outcome.message
        kept = {name: reply[name] for name in SENT_BACK if name in reply}
        self.messages.append(self._keep(kept))
        return outcome


def reserialised(message: Body) -> Body:
    """Change a reply as clients do that keep calls as objects: spaces, key order, ids."""
    kept = {**message}
    if isinstance(kept.get("content"), str):
        kept["content"] = kept["content"].strip()
    kept.pop("reasoning_content", None)
    if calls := kept.get("tool_calls"):
        kept["tool_calls"] = [_reserialised_call(call, n) for n, call in enumerate(calls)]
    return kept


def _reserialised_call(call: Body, number: int) -> Body:
    function = call["function"]
    try:
        arguments = json.dumps(json.loads(function["arguments"]), indent=2, sort_keys=True)
    except ValueError:
        arguments = function["arguments"]
    return {
        "id": f"toolu_{number}_{str(call['id'])[-8:]}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
