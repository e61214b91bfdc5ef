"""Whether a dialect reads the calls that a template writes, and what the template itself loses.

A template is the only witness of how its model writes. A call is written with it and read back.
If the reading differs, the template is asked to write what was read: if that gives the same text,
no reader could tell the two apart, and the template loses the difference. Otherwise the dialect
is wrong.
"""

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rekindle.chat.conversation import Conversation, Message, Reasoning, Role, Text, ToolCall
from rekindle.chat.dialects.base import CallArguments, CallBegan, CallEnded, Dialect, ParsedCall
from rekindle.chat.dialects.choice import apply, choose
from rekindle.chat.reply.parser import ParsedReasoning, ParsedText, ReplyParser, parse
from rekindle.chat.template.guard import Guard
from rekindle.chat.template.template import ChatTemplate
from rekindle.common_prefix import n_common
from rekindle.errors import InvalidRequest
from tests.support.call_probes import (
    BACKSLASHES,
    CLOSING_MARKS,
    OTHER_CALL,
    PROBES,
    QUESTION,
    SIMPLE,
    TOOLBOXES,
    Probe,
    Toolbox,
)
from tests.support.extended_tokenizer import CONTROL_STRING, END_STRINGS

# A word, or an escaped character in a string literal.
WORD = re.compile(r"\\.|[A-Za-z][A-Za-z0-9]*(?:[_\u2581-][A-Za-z0-9]+)*")
ReplyPart = Text | Reasoning | ToolCall
SAID, THOUGHT = Text("Wsaid"), Reasoning("Wthought")


class Origin(StrEnum):
    DERIVED = "derived"
    BY_HAND = "by hand"
    GENERIC = "generic"  # and it says so


@dataclass(frozen=True)
class Chosen:
    dialect: Dialect
    origin: Origin
    reason: str = ""  # why it is generic


def chosen(template: ChatTemplate) -> Chosen:
    choice = choose(template)
    apply(choice, template)
    origin = Origin(choice.origin.value)
    reason = "" if origin is Origin.DERIVED else choice.line.partition(": ")[2]
    return Chosen(choice.dialect, origin, reason)


def loaded(source: str) -> ChatTemplate:
    guard = Guard(tuple(sorted({"<s>", "</s>", *CONTROL_STRING.findall(source)})))
    return ChatTemplate(source, bos_text="<s>", eos_text="</s>", guard=guard)


@dataclass(frozen=True)
class Reading:
    calls: tuple[ParsedCall, ...]
    text: str
    reasoning: str

    def calls_same(self, wanted: Iterable[ToolCall]) -> bool:
        return list(map(meaning, self.calls)) == list(map(meaning, wanted))


@dataclass(frozen=True)
class Written:
    text: str  # of the reply, and of what ends it
    begins_in_reasoning: bool


def toolbox_of(template: ChatTemplate) -> Toolbox:
    """Return the first tools that the template does not refuse."""
    for box in TOOLBOXES[:-1]:
        try:
            shown(template, box)
        except InvalidRequest:
            continue
        return box
    return TOOLBOXES[-1]


def shown(
    template: ChatTemplate, box: Toolbox, *messages: Message, add_generation_prompt: bool = False
) -> str:
    asked = Conversation((QUESTION, *messages), box.tools)
    pieces = template.render(asked, add_generation_prompt=add_generation_prompt)
    return "".join(piece.text for piece in pieces)


class Scribe:
    """Writes replies with a template, and reads them with a dialect."""

    def __init__(self, template: ChatTemplate, dialect: Dialect) -> None:
        self._template = template
        self.writes_calls = template.traits.tools and template.traits.calls
        self.dialect = dialect
        self.box = toolbox_of(template)
        self._prompt = shown(template, self.box, add_generation_prompt=True)

    def written(self, *parts: ReplyPart) -> Written:
        """Return the reply behind the prompt, or behind as much of it as the template shows."""
        prompt, whole = (
            self._prompt,
            shown(self._template, self.box, Message(Role.ASSISTANT, parts)),
        )
        start = len(prompt)
        if not whole.startswith(prompt):
            start = n_common(prompt, whole)
            opened = max(whole.rfind(opening, 0, start) for opening in "<[")
            if opened >= 0 and not set(">]") & set(whole[opened:start]):
                start = opened  # not inside of a mark
            while start and (whole[start - 1] + whole[start : start + 1]).isalnum():
                start -= 1  # nor of a word
            start += max(k for k in range(60) if prompt.endswith(whole[start : start + k]))
        before, text = whole[:start].rstrip(), whole[start:]
        marks = self.dialect.reasoning
        # Some templates leave reasoning open in earlier turns, as no model does, or do not show
        # again that the prompt has opened it.
        begins = marks is not None and (
            text.lstrip().startswith(marks.closing)
            or (
                marks.opening.rstrip() not in text.partition(marks.closing)[0]
                and marks.closing in text
                and any(each.endswith(marks.opening.rstrip()) for each in (before, prompt.rstrip()))
            )
        )
        return Written(text, begins)

    def read(self, written: Written) -> Reading:
        begins = written.begins_in_reasoning
        said = parse(self.dialect, self.box.schemas, written.text, begins_in_reasoning=begins)
        return Reading(said.calls, said.text, said.reasoning)

    def calls_text(self, written: Written) -> str:
        """Return the reply from the mark that begins its calls to their end."""
        text = written.text.rstrip()
        found = (text.find(trigger.text) for trigger in self.dialect.triggers_for(self.box.schemas))
        start = min(position for position in found if position >= 0)
        rest = self.read(written).text.rstrip()  # what ends the turn stays text
        n_end = n_common(text[::-1], rest[::-1])
        text = text[start : len(text) - n_end].rstrip()
        for header in self.dialect.hidden:
            text = text.removesuffix(header)
        return text.rstrip()

    def read_in_pieces(self, written: Written, pieces: Iterable[str]) -> Reading:
        """Read a reply whose calls are passed on while they arrive."""
        parser = ReplyParser(
            self.dialect,
            self.box.schemas,
            begins_in_reasoning=written.begins_in_reasoning,
            may_stream=lambda _name: True,
        )
        parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
        calls = [part.call for part in parts if isinstance(part, CallEnded)]
        assert [part.name for part in parts if isinstance(part, CallBegan)] == [
            call.name for call in calls
        ]
        sent = "".join(part.json for part in parts if isinstance(part, CallArguments))
        assert sent == "".join(call.arguments_json for call in calls)
        return Reading(
            tuple(calls),
            "".join(part.text for part in parts if isinstance(part, ParsedText)),
            "".join(part.text for part in parts if isinstance(part, ParsedReasoning)),
        )


def meaning(call: ToolCall | ParsedCall) -> object:
    return call.name, exact(json.loads(call.arguments_json))


def exact(value: object) -> object:
    """Python takes True for 1, which is another argument. 1.0 is not."""
    match value:
        case dict():
            return {key: exact(item) for key, item in value.items()}
        case list():
            return [exact(item) for item in value]
        case bool():
            return "true" if value else "false", bool
        case _:
            return value


def random_pieces(text: str, seed: int) -> list[str]:
    cuts = random.Random(seed)
    pieces = []
    while text:
        n_chars = cuts.choice((1, 1, 2, 3, 5, 8, 40))
        pieces.append(text[:n_chars])
        text = text[n_chars:]
    return pieces


@dataclass
class Verdict:
    chosen: Chosen
    writes_calls: bool  # the template does, and describes tools
    lost: dict[str, None] = field(default_factory=dict)  # kinds of values, in order
    wrong: list[str] = field(default_factory=list)  # readings that differ from what was written


def verdict_on(
    source: str,
    words: Mapping[str, str] | None = None,
    probes: Sequence[Probe] = PROBES,
) -> Verdict:
    """Judge the dialect of a template. `words` are those that were renamed in its source."""
    template = loaded(source)
    ends = [WORD.sub(lambda word: (words or {}).get(word[0], word[0]), end) for end in END_STRINGS]
    return Judge(template, chosen(template), ends, probes).verdict


class Judge:
    """Judges the choice of a dialect. `ends` are the strings that may end a turn."""

    def __init__(
        self, template: ChatTemplate, choice: Chosen, ends: Sequence[str], probes: Sequence[Probe]
    ) -> None:
        self._scribe = Scribe(template, choice.dialect)
        self.verdict = Verdict(choice, self._scribe.writes_calls)
        self._ends = ends
        self._template = template
        self._splits_calls = template.traits.split_calls
        if choice.origin is Origin.GENERIC and self._scribe.writes_calls:
            return
        try:
            self._written = self._scribe.written(SIMPLE.call)
        except InvalidRequest as error:
            self.verdict.wrong.append(f"a call is refused: {error.message}")
            return
        escaped = self._scribe.written(BACKSLASHES.call).text
        self._writes_strings_raw = BACKSLASHES.arguments["the_string"] in escaped
        self._tail = self._scribe.read(self._written).text
        if self._scribe.box != TOOLBOXES[0]:
            self.verdict.lost["tools that take objects (refused)"] = None
        if leak := self._leak():
            self.verdict.wrong.append(f"{leak!r} is left of {self._written.text!r}")
        for probe in probes:
            if not probe.parts or not self._is_read(probe.call):
                for part in probe.parts or (probe,):
                    self._try(part.kind, part.call)
        self._try("several calls", SIMPLE.call, OTHER_CALL)
        self._try("text before calls", SAID, SIMPLE.call)
        self._try("reasoning before calls", THOUGHT, SIMPLE.call)
        self._try("reasoning before text", THOUGHT, SAID)
        if {f"reasoning before {part}" for part in ("calls", "text")} <= self.verdict.lost.keys():
            rest = (kind for kind in self.verdict.lost if not kind.startswith("reasoning"))
            self.verdict.lost = dict.fromkeys((*rest, "reasoning"))

    def _leak(self) -> str:
        """Return the text of the call that is left over before the turn ends."""
        found = [at for end in self._ends if (at := self._tail.find(end)) >= 0]
        return self._tail[: min(found, default=len(self._tail))].strip()

    def _try(self, kind: str, *parts: ReplyPart) -> None:
        try:
            written = self._scribe.written(*parts)
        except InvalidRequest:
            self.verdict.lost[f"{kind} (refused)"] = None
            return
        reading = self._scribe.read(written)
        if self._is_right(reading, parts):
            self._check_ids(kind, written, reading)
            return
        if self._is_same_to_the_template(written, reading, parts):
            self.verdict.lost[kind] = None
        elif reason := self._excuse(parts):
            self.verdict.lost[reason] = None
        else:
            said = f"{reading.calls}, text {reading.text!r}, reasoning {reading.reasoning!r}"
            self.verdict.wrong.append(f"{kind}: {written.text!r} is read as {said}")

    def _check_ids(self, kind: str, written: Written, reading: Reading) -> None:
        """Results refer to the ids, so an id that is read must be the one that is written."""
        for call, read in zip((SIMPLE.call, OTHER_CALL), reading.calls, strict=False):
            if call.id in written.text and read.id not in ("", call.id):
                self.verdict.wrong.append(f"{kind}: the id {call.id} is read as {read.id}")

    def _is_read(self, call: ToolCall) -> bool:
        try:
            return self._is_right(self._scribe.read(self._scribe.written(call)), (call,))
        except InvalidRequest:
            return False

    def _is_same_to_the_template(
        self, written: Written, reading: Reading, parts: Sequence[ReplyPart]
    ) -> bool:
        calls = [
            replace(call, name=read.name, arguments_json=read.arguments_json)
            for call, read in zip((SIMPLE.call, OTHER_CALL), reading.calls, strict=False)
        ]
        again = (*self._seen(parts, reading), *calls)
        if not again or not all(map(self._scribe.box.allows, calls)):
            return False
        try:
            return self._scribe.written(*again).text == written.text
        except InvalidRequest:
            return False

    def _excuse(self, parts: Sequence[ReplyPart]) -> str:
        """Return what the template cannot write so that it can be read, or ""."""
        if self._splits_calls and SAID in parts:
            return "text before calls"
        if len(parts) > 1 or not isinstance(parts[0], ToolCall):
            return ""
        if not self._scribe.box.declares(parts[0]):
            return "undeclared strings like JSON"
        if not self._writes_strings_raw:
            return ""
        value = json.loads(parts[0].arguments_json).get("the_string", "")
        closing = self._written.text.partition("Ada")[2].strip()
        if closing[:1] in ("'", '"') and set(value) & set("'\"\\"):
            return "quotes and backslashes"
        is_own = any(mark in value and mark in self._written.text for mark in CLOSING_MARKS)
        return "strings with its own marks" if is_own else ""

    def _seen(self, parts: Sequence[ReplyPart], reading: Reading) -> Iterator[ReplyPart]:
        """Yield the text and the reasoning of a reply as far as they were read."""
        for part in parts:
            match part:
                case Text(text) if text in reading.text:
                    yield part
                case Reasoning(text) if text == reading.reasoning.strip():
                    yield part

    def _is_right(self, reading: Reading, parts: Sequence[ReplyPart]) -> bool:
        calls = [part for part in parts if isinstance(part, ToolCall)]
        seen = list(self._seen(parts, reading))
        is_all = len(seen) + len(calls) == len(parts)
        rest = reading.text.replace(SAID.text, "").strip()
        is_clean = not calls or len(parts) > 1 or rest == self._tail.strip()
        return is_all and is_clean and reading.calls_same(calls)
