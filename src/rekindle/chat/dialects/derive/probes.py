"""Probe conversations: tiny ones of marker words, which differ in one thing.

A marker word occurs nowhere else, so that its place in the rendered text tells what it became.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.chat.conversation import (
    Conversation,
    Message,
    Part,
    Reasoning,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolResult,
)
from rekindle.chat.dialects.derive.pieces import atoms, common_start
from rekindle.chat.template.template import ChatTemplate
from rekindle.errors import InvalidRequest

USER = "Zquser"
AGAIN = "Zqagain"
RESULT = "Zqresult"
TEXT = "Zqtext"
THOUGHT = "Zqthought"
NAMES = ("Zqtoolx", "Zqtooly")
OTHER_NAME = "zq_other-tool2"  # of another length and case, with signs
IDS = ("Zqid0000x", "Zqid0000y")  # nine letters and digits: some templates require it
OTHER_ID = "Zqid0000z"
# Not in the order of the alphabet.
PAIR = {"Zqkeyb": "Zqvalueb", "Zqkeya": "Zqvaluea"}
OTHER_PAIR = {"Zqkeyd": "Zqvalued", "Zqkeyc": "Zqvaluec"}
NUMBERS = {"Zqkeya": 70131, "Zqkeyb": 70132}

AWKWARD = 'Zq\'s "q" \\n {x} [y], <b>z</b>\n\tthe end: \u00e9'
# Values of each JSON type, by what they are called in a loss.
KINDS: Mapping[str, Any] = {
    "a string": "Zqvalue",
    "a string with quotes, line breaks and markup": AWKWARD,
    "a string that looks like a number": "12",
    "an integer": 70131,
    "a negative integer": -5,
    "a fraction": 2.5,
    "true": True,
    "false": False,
    "null": None,
    "an array": [70141, 70142],
    "an array of strings": ["Zqone", "Zqtwo"],
    "an object": {"Zqm": "Zqthree", "Zqn": 70143},
    "an array in an object": {"Zqm": [{"Zqn": [1, 2]}], "Zqo": False},
    "an array of several types": [70144, "Zqfour", True],
    "an awkward string in an array": [AWKWARD],
    "an empty array": [],
    "an empty object": {},
    "null in an array": [None, 1],
    "an empty string": "",
    "a string with white space around it": "  Zq padded \n",
}
KEYS = tuple(f"Zqk{i:02}z" for i in range(len(KINDS)))
GALLERY = dict(zip(KEYS, KINDS.values(), strict=True))


def schema_of(value: Any) -> dict[str, Any]:
    """Return a schema that says the type of every part of the value."""
    match value:
        case bool():
            return {"type": "boolean"}
        case str():
            return {"type": "string"}
        case int():
            return {"type": "integer"}
        case float():
            return {"type": "number"}
        case None:
            return {"type": "null"}
        case list():
            kinds = [schema_of(each) for each in value]
            same = kinds and all(kind == kinds[0] for kind in kinds)
            return {"type": "array", "items": kinds[0]} if same else {"type": "array"}
        case _:
            properties = {key: schema_of(each) for key, each in value.items()}
            return {"type": "object", "properties": properties}


_PARAMETERS = {
    "type": "object",
    "properties": {"Zqkeya": {"type": "string", "description": "a key"}},
}
# A plain definition: some templates fail at others.
_TOOLS = tuple(
    Tool(
        name,
        json.dumps(
            {
                "type": "function",
                "function": {"name": name, "description": "a tool", "parameters": _PARAMETERS},
            }
        ),
    )
    for name in NAMES
)


_MARKER = re.compile("Zq[a-z0-9]+")
MAX_TURN = 8_000  # characters of a turn with a few words; comparing more takes long; picked


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant turn as the template writes it."""

    text: str  # from the end of the user's words
    later: str = ""  # up to the words of the next message, where that is told apart
    is_cut: bool = False  # the text goes on to the words of the next message


def call(arguments: Mapping[str, Any], n: int = 0) -> ToolCall:
    return ToolCall(IDS[n], NAMES[n], json.dumps(arguments, ensure_ascii=False))


class Probes:
    """Renders probe conversations, each once."""

    def __init__(self, template: ChatTemplate, **template_kwargs: bool) -> None:
        self._template = template
        self._kwargs = template_kwargs
        self._turns: dict[tuple[Part, ...], Turn | None] = {}
        self.generation_prompt = self._behind_user((), add_generation_prompt=True) or ""

    @property
    def splits_calls(self) -> bool:
        return self._template.traits.split_calls

    @property
    def needs_short_ids(self) -> bool:
        return self._template.traits.short_call_ids

    @property
    def source(self) -> str:
        return self._template.source

    def turn(self, *parts: Part) -> Turn | None:
        """Return the turn with these parts; None if the template refuses it or omits a part."""
        if parts not in self._turns:
            self._turns[parts] = self._render_turn(parts)
        return self._turns[parts]

    def turn_saying(self, text: str) -> str | None:
        """Return an earlier turn with this text, up to the words of the next message.

        Another turn follows: some templates treat the last one of the assistant differently.
        """
        reply, other = (Message(Role.ASSISTANT, (Text(each),)) for each in (text, "Zqlater"))
        user = Message(Role.USER, (Text(AGAIN),))
        rendered = self._behind_user((reply, user, other, user))
        return None if rendered is None else rendered.partition(AGAIN)[0]

    def _render_turn(self, parts: tuple[Part, ...]) -> Turn | None:
        """Render the turn as the last one and with a message behind it.

        Some templates write the last turn differently, and some refuse a call without a result.
        """
        calls = [part for part in parts if isinstance(part, ToolCall)]
        words = [part.text for part in parts if isinstance(part, Text | Reasoning)]
        words += [each.name for each in calls]
        reply = Message(Role.ASSISTANT, parts)
        last = self._behind_user((reply,))
        if calls:
            results = [ToolResult(each.id, each.name, RESULT) for each in calls]
            later = tuple(Message(Role.TOOL, (result,)) for result in results)
        else:
            later = (Message(Role.USER, (Text(AGAIN),)),)
        followed = self._behind_user((reply, *later))
        if followed is not None:
            followed = followed[: followed.find(RESULT if calls else AGAIN)]

        def is_whole(text: str | None) -> bool:
            return text is not None and all(word in text for word in words)

        if followed is None or not is_whole(followed):
            return Turn(last) if last is not None and is_whole(last) else None
        if last is not None:
            both = "".join(map(str, common_start(atoms(last), atoms(followed))))
            is_all = not last[len(both) :].strip()
            is_all = is_all or all(word in both for word in _MARKER.findall(followed))
            if is_whole(both) and is_all:
                return Turn(both, followed[len(both) :])
        return Turn(followed, is_cut=True)

    def _behind_user(
        self, messages: tuple[Message, ...], *, add_generation_prompt: bool = False
    ) -> str | None:
        user = Message(Role.USER, (Text(USER),))
        conversation = Conversation((user, *messages), _TOOLS, template_kwargs=self._kwargs)
        try:
            pieces = self._template.render(
                conversation, add_generation_prompt=add_generation_prompt
            )
        except InvalidRequest:
            return None
        text = "".join(piece.text for piece in pieces)
        _, found, behind = text.rpartition(USER)
        return behind if found and len(behind) <= MAX_TURN else None
