"""What a tool dialect is: how one family of models writes its calls, and its thoughts.

Everything here is text. A dialect reads whole calls, and writes the grammar that makes a model
write them; `reply_parser` does the streaming for all of them.
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
    id: str = ""  # where the model writes one, and results refer to it


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    calls: tuple[ParsedCall, ...]
    n_chars: int  # of the text that they took


class NotACall(Exception):
    """The text began like a call and is none: it stays text."""


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    opening: str
    closing: str
    anywhere: bool = False  # also behind text; otherwise only where the reply begins


class CallReader(Protocol):
    def __call__(self, text: str, schemas: Schemas, /) -> ParsedCalls | None:
        """The calls at the beginning of `text`, which starts with a trigger.

        None: more text is needed. Raises NotACall. An answer other than None stays the same
        whatever follows.
        """
        ...


class GrammarWriter(Protocol):
    def __call__(self, schemas: Schemas, *, parallel: bool, literal: Literal) -> str:
        """Lark source whose `start` matches calls from the trigger on, up to the end of the turn.

        White space in front of the first trigger is allowed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    name: str
    triggers: tuple[Trigger, ...]  # what a call begins with
    endings: tuple[str, ...]  # what it may end with: no need to read before one has come
    read: CallReader
    grammar: GrammarWriter
    reasoning: ReasoningMarks | None = None
    hidden: tuple[str, ...] = ()  # headers between the parts of a reply, shown to nobody
    # The same where the reply begins or behind a call; elsewhere an answer may talk of them.
    hidden_at_edges: tuple[str, ...] = ()
