"""A tool dialect: how one family of models writes its calls and its reasoning.

A dialect reads calls while they arrive, and writes the grammar that makes a model write them.
`reply/parser.py` finds the text that is for the reader.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from rekindle.chat.dialects.syntax.cursor import Cursor, Steps
from rekindle.chat.dialects.syntax.json_text import NotACall, without_halves
from rekindle.chat.dialects.syntax.lark import Literal, Rules, Schemas
from rekindle.generation.request import Trigger


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments_json: str  # always a valid JSON object, without halves of surrogate pairs
    id: str = ""  # if the model writes one, and results refer to it


@dataclass(frozen=True, slots=True)
class CallBegan:
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    json: str  # the next piece of the arguments' JSON text


@dataclass(frozen=True, slots=True)
class CallEnded:
    call: ParsedCall  # its arguments are all pieces together


CallPart = CallBegan | CallArguments | CallEnded


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    opening: str
    closing: str
    anywhere: bool = False  # also after text; otherwise only where the reply begins


class CallDraft:
    """Collects the parts of calls. Only calls of tools that the client offers are accepted."""

    def __init__(self, cursor: Cursor, schemas: Schemas) -> None:
        self.schemas = schemas
        self.end_position = 0  # of the last call that ended
        self._cursor = cursor
        self._parts: list[CallPart] = []
        self._name: str | None = None
        self._id = ""
        self._written: list[str] = []
        self._arguments: list[str] = []  # the pieces that are parts

    @property
    def has_begun(self) -> bool:
        return self._name is not None

    def begin(self, name: str, call_id: str = "") -> None:
        if name not in self.schemas:
            raise NotACall("the client offered no such tool")
        self._name, self._id = name, call_id
        self._parts.append(CallBegan(name, call_id))

    def write(self, json: str) -> None:
        """Add a piece of the arguments."""
        self._written.append(json)

    def end(self) -> None:
        assert self._name is not None
        self._collect_written(is_whole=True)
        call = ParsedCall(self._name, "".join(self._arguments), self._id)
        self._parts.append(CallEnded(call))
        self._name, self._id, self._arguments = None, "", []
        self.end_position = self._cursor.n_read

    def take(self) -> list[CallPart]:
        self._collect_written(is_whole=False)
        parts, self._parts = self._parts, []
        return parts

    def _collect_written(self, *, is_whole: bool) -> None:
        piece, held = without_halves("".join(self._written), is_whole=is_whole)
        self._written = [held] if held else []
        if piece:
            self._arguments.append(piece)
            self._parts.append(CallArguments(piece))


class CallSyntax(Protocol):
    """How calls are read and written."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All fixed strings of calls."""

    def triggers_for(self, names: Collection[str]) -> tuple[Trigger, ...]:
        """Return the strings that begin a call of these tools."""

    def walk(self, cursor: Cursor, draft: CallDraft) -> Steps[None]:
        """Read the calls at the cursor into the draft."""

    def write(self, rules: Rules, schemas: Schemas) -> str:
        """Return Lark that matches calls from the trigger to the end of the turn."""


class CallReader:
    """Reads the calls that begin with a trigger, piece by piece."""

    def __init__(self, syntax: CallSyntax, schemas: Schemas) -> None:
        self._cursor = Cursor()
        self._draft = CallDraft(self._cursor, schemas)
        self._steps = syntax.walk(self._cursor, self._draft)
        self._pieces: list[str] = []
        self._error: NotACall | None = None
        self._is_done = False

    @property
    def is_done(self) -> bool:
        """Whether the calls have ended."""
        return self._is_done

    @property
    def rest(self) -> str:
        """The text after the calls; after NotACall, the text behind the last call that ended."""
        if self._is_done:
            return self._cursor.rest
        return "".join(self._pieces)[self._draft.end_position :]

    def feed(self, text: str) -> list[CallPart]:
        """Return what is known now. Raises NotACall: what was returned before stays returned."""
        self._cursor.feed(text)
        self._pieces.append(text)
        return self._advance()

    def finish(self) -> list[CallPart]:
        """Return what is left; no more text comes. Call it until `is_done`.

        Raises CutOff if a call is incomplete.
        """
        self._cursor.end()
        return self._advance()

    def _advance(self) -> list[CallPart]:
        """Read on until text is missing. An error waits for the next time if parts came before."""
        if self._error is None and not self._is_done:
            try:
                next(self._steps)
            except StopIteration:
                self._is_done = True
            except NotACall as error:
                self._error = error
        parts = self._draft.take()
        if self._error is not None and not parts:
            raise self._error
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    name: str
    syntax: CallSyntax
    reasoning: ReasoningMarks | None = None
    hidden: tuple[str, ...] = ()  # headers between the parts of a reply, never shown
    # Hidden only at the beginning and the end of the reply, and next to a call. Text otherwise.
    hidden_at_edges: tuple[str, ...] = ()
    parallel: bool = True  # several calls in one reply

    @property
    def marks(self) -> tuple[str, ...]:
        """All fixed strings of the dialect."""
        reasoning = (self.reasoning.opening, self.reasoning.closing) if self.reasoning else ()
        return self.syntax.marks + self.hidden + self.hidden_at_edges + reasoning

    def triggers_for(self, names: Collection[str]) -> tuple[Trigger, ...]:
        """Return the strings that begin a call of these tools."""
        return self.syntax.triggers_for(names)

    def reader(self, schemas: Schemas) -> CallReader:
        return CallReader(self.syntax, schemas)

    def grammar(self, schemas: Schemas, *, parallel: bool, literal: Literal) -> str:
        """Return Lark source. White space before the first trigger is allowed."""
        rules = Rules(literal, parallel=parallel and self.parallel)
        return rules.source(self.syntax.write(rules, schemas))
