"""A tool dialect: how one family of models writes its calls and its reasoning.

A dialect reads whole calls from text, and writes the grammar that makes a model write them.
`reply/parser.py` does the streaming for all dialects.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rekindle.chat.dialects.syntax.cursor import Cursor, NeedMore
from rekindle.chat.dialects.syntax.json_text import NotACall
from rekindle.chat.dialects.syntax.lark import Literal, Rules, Schemas
from rekindle.generation.request import Trigger


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments_json: str  # always a valid JSON object
    id: str = ""  # if the model writes one, and results refer to it


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    calls: tuple[ParsedCall, ...]
    n_chars: int  # the length of their text


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    opening: str
    closing: str
    anywhere: bool = False  # also after text; otherwise only where the reply begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    name: str
    triggers: tuple[Trigger, ...]  # strings that begin a call
    endings: tuple[str, ...]  # strings that may end a call: no call is read before one of them
    # Reads the calls at the cursor. May raise NeedMore where the text ends.
    walk: Callable[[Cursor, Schemas], list[ParsedCall]]
    # Returns Lark that matches calls from the trigger to the end of the turn.
    write: Callable[[Rules, Schemas], str]
    reasoning: ReasoningMarks | None = None
    hidden: tuple[str, ...] = ()  # headers between the parts of a reply, never shown
    # Hidden only at the beginning of the reply and after a call. Elsewhere they are answer text.
    hidden_at_edges: tuple[str, ...] = ()

    def read(self, text: str, schemas: Schemas) -> ParsedCalls | None:
        """Read the calls at the beginning of `text`, which starts with a trigger.

        Return None if more text is needed. Raises NotACall. Once calls are returned, more text
        does not change them.
        """
        cursor = Cursor(text)
        try:
            calls = self.walk(cursor, schemas)
        except NeedMore:
            return None
        except RecursionError:
            raise NotACall("too deep") from None
        if not calls:
            raise NotACall("no call in it")
        return ParsedCalls(tuple(calls), cursor.position)

    def grammar(self, schemas: Schemas, *, parallel: bool, literal: Literal) -> str:
        """Return Lark source. White space before the first trigger is allowed."""
        rules = Rules(literal, parallel=parallel)
        return rules.source(self.write(rules, schemas))


def dialect_between(
    name: str,
    opening: str,
    closing: str,
    walk: Callable[[Cursor, Schemas], list[ParsedCall]],
    write: Callable[[Rules, Schemas], str],
) -> Dialect:
    """Return a dialect whose calls begin with one mark and end with another."""
    triggers, endings = (Trigger(opening),), (closing,)
    return Dialect(name=name, triggers=triggers, endings=endings, walk=walk, write=write)
