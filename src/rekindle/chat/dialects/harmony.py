"""gpt-oss: messages in channels. Analysis is reasoning, commentary to a function is a call.

No format describes it: the recipient stands before or behind the channel, as the model likes.
A call ends the turn with an end token of its own, which is not part of the reply.
"""

from collections.abc import Collection

from rekindle.chat.dialects.base import CallDraft, Dialect, ReasoningMarks
from rekindle.chat.dialects.object_calls import json_object
from rekindle.chat.dialects.syntax.cursor import Cursor, Mark, Steps
from rekindle.chat.dialects.syntax.lark import Rules, Schemas, quote
from rekindle.generation.request import Trigger

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END = "<|constrain|>", "<|end|>"
TO = "to=functions."

_REASONING = ReasoningMarks(f"{CHANNEL}analysis{MESSAGE}", END, anywhere=True)

_HIDDEN = (
    f"{START}assistant",
    f"{CHANNEL}final{MESSAGE}",
    f"{CHANNEL}final {CONSTRAIN}json{MESSAGE}",
    f"{CHANNEL}commentary{MESSAGE}",
    END,
    "<|return|>",
    "<|call|>",
)

_BEGINNING, _CHANNEL, _TO = Mark(f"{START}assistant"), Mark(CHANNEL), Mark(TO)
_CHANNELS = (Mark("commentary"), Mark("analysis"))
_CONSTRAIN, _MESSAGE = Mark(CONSTRAIN), Mark(MESSAGE)


class HarmonySyntax:
    marks = (START, CHANNEL, MESSAGE, CONSTRAIN, END)

    def triggers_for(self, names: Collection[str]) -> tuple[Trigger, ...]:
        """Return the strings that begin a call."""
        return (
            Trigger(f"{CHANNEL}commentary {TO}"),
            Trigger(f"{CHANNEL}analysis {TO}"),
            Trigger(f"{START}assistant {TO}"),
            Trigger(TO, at_start=True),  # the prompt ends with the start of the message
        )

    def walk(self, cursor: Cursor, draft: CallDraft) -> Steps[None]:
        """Read one call."""
        yield from cursor.accept(_BEGINNING)
        yield from self._skip_channel(cursor)
        yield from cursor.expect(_TO)
        draft.begin((yield from cursor.word()))
        yield from self._skip_channel(cursor)
        yield from cursor.accept(_CONSTRAIN)
        if not (yield from cursor.sees(_MESSAGE)):
            yield from cursor.word()  # the content type, which is always JSON
        yield from cursor.expect(_MESSAGE)
        yield from json_object(cursor, draft.write)
        draft.end()

    def _skip_channel(self, cursor: Cursor) -> Steps[None]:
        if (yield from cursor.accept(_CHANNEL)):
            yield from cursor.expect(*_CHANNELS)

    def write(self, rules: Rules, schemas: Schemas) -> str:
        """Write the grammar. The recipient may come before or after the channel."""
        literal = rules.literal
        start, channel = f'{literal(START)} "assistant"', literal(CHANNEL)
        json_type = f'(" json" | " "? {literal(CONSTRAIN)} "json")? {literal(MESSAGE)}'
        rules.add("to_front", f'({start} " ")? "{TO}"')
        rules.add("to_behind", f'({start})? {channel} ("commentary" | "analysis") " {TO}"')
        return rules.calls(
            schemas,
            lambda name, arguments: (
                f'(to_front {quote(name)} {channel} "commentary" | to_behind {quote(name)})'
                f" {json_type} {arguments}"
            ),
        )


HARMONY = Dialect(name="harmony", syntax=HarmonySyntax(), reasoning=_REASONING, hidden=_HIDDEN)
