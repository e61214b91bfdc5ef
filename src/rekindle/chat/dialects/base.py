"""A tool dialect: how one family of models writes its calls and its reasoning.

A dialect reads whole calls from text, and writes the grammar that makes a model write them.
`reply/parser.py` does the streaming for all dialects.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rekindle.generation.request import Trigger

Schemas = Mapping[str, dict[str, Any]]  # JSON schema of the arguments by name of the tool
Literal = Callable[[str], str]  # text as a Lark expression: control strings become tokens


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments_json: str  # always a valid JSON object
    id: str = ""  # if the model writes one, and results refer to it


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    calls: tuple[ParsedCall, ...]
    n_chars: int  # the length of their text


class NotACall(Exception):
    """The text begins like a call but is none. It stays text."""


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    opening: str
    closing: str
    anywhere: bool = False  # also behind text; otherwise only where the reply begins


class CallReader(Protocol):
    def __call__(self, text: str, schemas: Schemas, /) -> ParsedCalls | None:
        """Read the calls at the beginning of `text`, which starts with a trigger.

        Return None if more text is needed. Raises NotACall. Once calls are returned, more text
        does not change them.
        """
        ...


class GrammarWriter(Protocol):
    def __call__(self, schemas: Schemas, *, parallel: bool, literal: Literal) -> str:
        """Return Lark source. Its `start` matches calls from the trigger to the end of the turn.

        White space before the first trigger is allowed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    name: str
    triggers: tuple[Trigger, ...]  # strings that begin a call
    endings: tuple[str, ...]  # strings that may end a call: it is not read before one came
    read: CallReader
    grammar: GrammarWriter
    reasoning: ReasoningMarks | None = None
    hidden: tuple[str, ...] = ()  # headers between the parts of a reply, never shown
    # Hidden only at the beginning of the reply and behind a call. Elsewhere they are answer text.
    hidden_at_edges: tuple[str, ...] = ()
