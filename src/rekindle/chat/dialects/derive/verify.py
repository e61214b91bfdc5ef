"""Proves a derived dialect: every probe call that the template writes reads back the same."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from rekindle.chat.conversation import Part, Reasoning, Text, ToolCall
from rekindle.chat.dialects.base import Dialect
from rekindle.chat.dialects.call_format import Slot
from rekindle.chat.dialects.derive.arguments import CannotDerive
from rekindle.chat.dialects.derive.calls import Calls
from rekindle.chat.dialects.derive.locate import n_header_atoms
from rekindle.chat.dialects.derive.pieces import atoms, literal
from rekindle.chat.dialects.derive.probes import (
    GALLERY,
    IDS,
    KINDS,
    NUMBERS,
    OTHER_ID,
    OTHER_NAME,
    OTHER_PAIR,
    PAIR,
    TEXT,
    THOUGHT,
    Probes,
    Turn,
    call,
    schema_of,
)
from rekindle.chat.dialects.syntax.lark import Schemas
from rekindle.chat.reply.parser import ParsedReply, parse

# Calls need these: without one of them the derivation fails.
_NEEDED = (
    *("a string", "an integer", "a fraction", "true", "false"),
    *("an array", "an array of strings", "an object", "an array in an object"),
)


class WrittenCalls(NamedTuple):
    """Calls as the template wrote them, which read back the same."""

    what: str
    is_needed: bool  # otherwise a spelling that models may do without
    schemas: Schemas
    text: str


class Verifier:
    """Reads the turns that a template writes with a dialect."""

    def __init__(self, probes: Probes, calls: Calls, dialect: Dialect) -> None:
        self._probes = probes
        self._calls = calls
        self.dialect = dialect
        self.written: list[WrittenCalls] = []

    def reads_reasoning(self) -> bool:
        """Return whether a call behind reasoning reads back, if the template writes one."""
        parts = (Reasoning(THOUGHT), call(PAIR))
        return not self._shows_reasoning or not self._fault("a call behind reasoning", *parts)

    @property
    def _shows_reasoning(self) -> bool:
        return self._probes.turn(Reasoning(THOUGHT), call(PAIR)) is not None

    def losses(self) -> tuple[str, ...]:
        """Return what does not read back. Raises CannotDerive if that is something needed."""
        own = self._calls.format
        self._need("a call", call(PAIR))
        self._need("a call with numbers", call(NUMBERS))
        if not self._probes.splits_calls and not own.at_start:
            self._need("a call behind text", Text(TEXT), call(PAIR))
        other = replace(call(PAIR), name=OTHER_NAME)
        what = "a call of a tool with another kind of name"
        if fault := self._fault(what, other):
            raise CannotDerive(f"{what} {fault}")
        if self._calls.is_parallel:
            self._need("two calls", call(PAIR), call(OTHER_PAIR, 1))
            third = replace(other, id=OTHER_ID)
            self._need("three calls", call(PAIR), call(OTHER_PAIR, 1), third)
        losses = []
        if self._shows_reasoning and self.dialect.reasoning is None:
            losses.append("reasoning cannot be told from text")
        if own.at_start:
            losses.append("a call behind text is text: any JSON begins like it")
        if not self._calls.is_parallel:
            losses.append("a turn has only one call")
        if fault := self._fault("a call without arguments", call({})):
            losses.append(f"a call without arguments {fault}")
        return (*losses, *self._lost_kinds())

    def _lost_kinds(self) -> list[str]:
        if not self._fault("a call with values of every type", call(GALLERY)):
            return []
        losses = []
        for kind, (key, value) in zip(KINDS, GALLERY.items(), strict=True):
            fault = self._fault(kind, call({key: value}))
            if fault and kind in _NEEDED:
                raise CannotDerive(f"{kind} {fault}")
            if fault:
                losses.append(f"{kind} {fault}")
        return losses

    def _need(self, what: str, *parts: Part) -> None:
        """Check a turn, unless the template refuses it."""
        if self._probes.turn(*parts) is None:
            return
        if fault := self._fault(what, *parts, is_needed=True):
            raise CannotDerive(f"{what} {fault}")

    def _fault(self, what: str, *parts: Part, is_needed: bool = False) -> str:
        """Say what happens to this turn that should not. "": nothing."""
        turn = self._probes.turn(*parts)
        if turn is None:
            return "is refused by the template"
        text, begins_in_reasoning = self._reply(turn)
        schemas = {
            part.name: schema_of(json.loads(part.arguments_json))
            for part in parts
            if isinstance(part, ToolCall)
        }
        reply = parse(self.dialect, schemas, text, begins_in_reasoning=begins_in_reasoning)
        if not self._is_same(reply, parts, turn.text):
            return "does not read back"
        calls = self._calls_in(text, reply.text, schemas)
        self.written.append(WrittenCalls(what, is_needed, schemas, calls))
        return ""

    def _is_same(self, reply: ParsedReply, parts: tuple[Part, ...], text: str) -> bool:
        wanted = [part for part in parts if isinstance(part, ToolCall)]
        has_ids = Slot.ID in self._calls.format.call and IDS[0] in text
        if len(wanted) != len(reply.calls):
            return False
        for mine, read in zip(wanted, reply.calls, strict=True):
            same_id = read.id == mine.id or not has_ids
            if read.name != mine.name or not same_id:
                return False
            if not _same(json.loads(read.arguments_json), json.loads(mine.arguments_json)):
                return False
        thoughts = "".join(part.text for part in parts if isinstance(part, Reasoning))
        said = "".join(part.text for part in parts if isinstance(part, Text))
        return reply.reasoning.strip() == thoughts and reply.text.strip().startswith(said)

    def _reply(self, turn: Turn) -> tuple[str, bool]:
        """Return the turn from the end of the prompt to its own end."""
        found = atoms(turn.text)
        n_header = n_header_atoms(self._probes, found)
        header, text = literal(found[:n_header]), literal(found[n_header:])
        marks = self.dialect.reasoning
        if marks is None:
            return text.removesuffix(literal(self._calls.end)), False
        prompts = [header]
        # Earlier turns may lack what the prompt opens reasoning with.
        if text.lstrip().startswith((THOUGHT, marks.closing)):
            prompts.append(self._probes.generation_prompt)
        opens = any(prompt.rstrip().endswith(marks.opening.rstrip()) for prompt in prompts)
        return text.removesuffix(literal(self._calls.end)), opens

    def _calls_in(self, text: str, said: str, schemas: Schemas) -> str:
        """Return the calls, from the first trigger to their end."""
        triggers = self.dialect.triggers_for(schemas.keys())
        at = min((i for t in triggers if (i := text.find(t.text)) >= 0), default=len(text))
        # What was said may stand before the calls, behind them, or around them.
        behind = said.strip().removeprefix(TEXT if TEXT in text[:at] else "").strip()
        calls = text[at:]
        if behind and behind in calls:
            calls = calls[: calls.rindex(behind)]
        for mark in self.dialect.hidden:  # such as the token that ends a turn with calls
            calls = calls.rstrip().removesuffix(mark)
        return calls.rstrip()


def _same(a: Any, b: Any) -> bool:
    """Return whether two JSON values are the same. 1 is not true."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)
