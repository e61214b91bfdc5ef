"""gpt-oss: messages in channels. Analysis is reasoning, commentary to a function is a call.

A call ends the turn with an end token of its own, which is not part of the reply.
"""

from rekindle.chat.dialects.base import Dialect, ParsedCall, ReasoningMarks
from rekindle.chat.dialects.syntax.cursor import Cursor
from rekindle.chat.dialects.syntax.json_text import arguments
from rekindle.chat.dialects.syntax.lark import Rules, Schemas, quote
from rekindle.generation.request import Trigger

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END = "<|constrain|>", "<|end|>"
TO = "to=functions."

REASONING = ReasoningMarks(f"{CHANNEL}analysis{MESSAGE}", END, anywhere=True)

HIDDEN = (
    f"{START}assistant",
    f"{CHANNEL}final{MESSAGE}",
    f"{CHANNEL}final {CONSTRAIN}json{MESSAGE}",
    f"{CHANNEL}commentary{MESSAGE}",
    END,
    "<|return|>",
    "<|call|>",
)


def _walk(cursor: Cursor, schemas: Schemas) -> list[ParsedCall]:
    cursor.accept(f"{START}assistant")
    _skip_channel(cursor.skip_space())
    cursor.expect(TO)
    name = cursor.name()
    _skip_channel(cursor.skip_space())
    if cursor.accept(CONSTRAIN):
        cursor.skip_space()
    if not cursor.sees(MESSAGE):
        cursor.name()  # the content type, which is always JSON
        cursor.skip_space()
    cursor.expect(MESSAGE)
    return [ParsedCall(name, arguments(cursor.skip_space().json_value("{")))]


def _skip_channel(cursor: Cursor) -> None:
    if cursor.accept(CHANNEL):
        cursor.expect("commentary", "analysis")
        cursor.skip_space()


def _write(rules: Rules, schemas: Schemas) -> str:
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


HARMONY = Dialect(
    name="harmony",
    triggers=(
        Trigger(f"{CHANNEL}commentary {TO}"),
        Trigger(f"{CHANNEL}analysis {TO}"),
        Trigger(f"{START}assistant {TO}"),
        Trigger(TO, at_start=True),  # the prompt ends with the start of the message
    ),
    endings=("}",),
    walk=_walk,
    write=_write,
)
