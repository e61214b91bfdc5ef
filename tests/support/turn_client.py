"""A random client of a chat: invented replies come back with the same meaning, spelled anew."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rekindle.chat.conversation import (
    Conversation,
    Message,
    Part,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolResult,
)
from rekindle.config.choices import ReasoningHistory
from tests.support.turn_bench import Exchange, TurnBench, cut_tokens, message_of
from tests.support.turn_oracle import SWITCH, Oracle
from tests.support.turn_templates import Kind, habits

N_EXAMPLES = int(os.environ.get("TURN_EXAMPLES", "60"))  # more for a long search
bounded = settings(
    max_examples=N_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

SPACE = st.sampled_from(["", "", " ", "\n", " \n\n", "\t"])
WORDS = st.sampled_from(
    [
        "It",
        " is",
        " red",
        ".",
        " caf\u00e9",
        "\u4f60\u597d",
        " \U0001f600",
        "\n",
        "  ",
        " 12",
        "{",
        '"',
    ]
)
WILD_WORDS = WORDS | st.sampled_from(
    [
        "<think>",
        "</think>\n\n",
        "<think>\nx\n</think>",
        "<tool_call>",
        '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>',
        "[TOOL_CALLS]",
        "<|im_end|>",
        "<|im_end|>\n<|im_start|>user\n",
        "<|im_start|>assistant\n",
        "|im_end|>",
        "\nUSER: ",
        "\nASSISTANT: ",
        "\\u00e9",
        "\u0301",
        "e\u0301",
    ]
)


def texts(words: st.SearchStrategy[str], *, least: int = 0) -> st.SearchStrategy[str]:
    return st.lists(words, min_size=least, max_size=4).map("".join)


def tool(name: str) -> Tool:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    function = {"name": name, "description": "Reads.", "parameters": parameters}
    return Tool(name, json.dumps({"type": "function", "function": function}))


READ, WRITE = tool("read"), tool("write")

KWARGS = st.sampled_from(
    [{}, {}, {"enable_thinking": False}, {SWITCH: False}, {SWITCH: True, "enable_thinking": True}]
)


class Chat:
    """One client, its conversation, and the replies that it got."""

    def __init__(self, bench: TurnBench, kind: Kind, data: st.DataObject) -> None:
        bench.forget()
        self.bench = bench
        self.oracle = Oracle(bench)
        self._kind = kind
        self.draw = data.draw
        self.exchanges: list[Exchange] = []

    def reply(self, conversation: Conversation, words: st.SearchStrategy[str]) -> Exchange:
        text = self._reply_text(words, with_calls=bool(conversation.tools))
        cuts = self.draw(st.lists(st.integers(0, 200), max_size=8))
        tokens = cut_tokens(self.bench.tokenizer, text, cuts)
        exchange = self.bench.reply(conversation, text, tokens)
        self.oracle.check(conversation, exchange.prompt)
        self.oracle.note(conversation, exchange)
        self.exchanges.append(exchange)
        return exchange

    def sent_back(self, exchange: Exchange) -> Message:
        """Meaning the same, spelled as this client does."""
        ids = [call.id for call in exchange.message.calls]
        if self.draw(st.booleans()):
            ids = [
                self.draw(st.sampled_from([call_id, f"toolu_{call_id[-2:]}"])) for call_id in ids
            ]
        message = message_of(exchange.said, ids, with_reasoning=self.draw(st.booleans()))
        return Message(Role.ASSISTANT, tuple(map(self._respelled, message.parts)))

    def is_whole(self, conversation: Conversation, index: int) -> bool:
        """Whether the prompt has the reply as it was sampled, reasoning included."""
        if self.oracle.restores(conversation, index):
            return True
        preserves = self.bench.history is not ReasoningHistory.TEMPLATE
        shows_all = self._kind is Kind.TRIMMED or (self._kind is Kind.SWITCHED and preserves)
        sent, said = conversation.messages[index], self.exchanges[_n_replies(conversation, index)]
        return shows_all and sent.reasoning.strip() == said.said.reasoning.strip()

    def follow_up(self, message: Message, words: st.SearchStrategy[str]) -> list[Message]:
        has_results = bool(message.calls) and self.draw(st.integers(0, 5)) > 0
        if has_results:
            return [
                Message(Role.TOOL, (ToolResult(call.id, None, self.draw(texts(words))),))
                for call in message.calls
            ]
        return [Message(Role.USER, (Text(self.draw(texts(words, least=1))),))]

    def _reply_text(self, words: st.SearchStrategy[str], *, with_calls: bool) -> str:
        reasoning = self.draw(texts(words)) if self.draw(st.booleans()) else ""
        text = self.draw(SPACE) + self.draw(texts(words)) + self.draw(SPACE)
        calls = []
        for _ in range(self.draw(st.sampled_from([0, 1, 1, 2])) if with_calls else 0):
            arguments = {"path": self.draw(texts(words)), "line": self.draw(st.integers(0, 1))}
            calls.append(self._written(arguments))
        habit = habits(self._kind)
        if habit.opens_reasoning:
            thought = f"{reasoning}\n</think>\n\n"
        else:
            thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
        if habit.lists_calls and calls:
            return f"{text}[TOOL_CALLS][{', '.join(calls)}]"
        if habit.lists_calls:
            return text
        return thought + "\n".join(
            [text, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
        )

    def _written(self, arguments: dict[str, object]) -> str:
        return self._json(
            {"name": self.draw(st.sampled_from(["read", "read", "write"])), "arguments": arguments}
        )

    def _json(self, value: object) -> str:
        dump = self.draw(
            st.sampled_from(
                [
                    partial(json.dumps, ensure_ascii=False),
                    partial(json.dumps, separators=(",", ":")),
                    partial(json.dumps, indent=1, ensure_ascii=False),
                ]
            )
        )
        return dump(value)

    def _respelled(self, part: Part) -> Part:
        match part:
            case Text(text):
                bare = self.draw(st.sampled_from([text, text.strip()]))
                return Text(self.draw(SPACE) + bare + self.draw(SPACE))
            case ToolCall(_, _, source):
                arguments = json.loads(source)
                keys = self.draw(st.permutations(sorted(arguments)))
                return replace(
                    part, arguments_json=self._json({key: arguments[key] for key in keys})
                )
            case _:
                return part


def _n_replies(conversation: Conversation, index: int) -> int:
    return sum(message.role is Role.ASSISTANT for message in conversation.messages[:index])


def beginning(chat: Chat, words: st.SearchStrategy[str], tools: Sequence[Tool]) -> Conversation:
    system = Message(Role.SYSTEM, (Text(chat.draw(texts(words, least=1))),))
    user = Message(Role.USER, (Text(chat.draw(texts(words, least=1))),))
    messages = (system, user) if chat.draw(st.booleans()) else (user,)
    return Conversation(messages, tuple(tools))
