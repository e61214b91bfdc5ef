"""Chooses the dialect of a model: by the setting, by its template, or by hand.

A dialect is derived from the template. A few are written by hand, because they know what no
template shows. Each of those is used only where it passes the same round trip, or where the
template writes no calls at all. Otherwise the model gets the generic description of tools.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from rekindle.chat.dialects.base import Dialect, ReasoningMarks
from rekindle.chat.dialects.call_format import CallFormat
from rekindle.chat.dialects.derive.derivation import CANNOT, Derivation, Derivations, prove
from rekindle.chat.dialects.derive.verify import WrittenCalls
from rekindle.chat.dialects.families import (
    GENERIC,
    GRANITE,
    GRANITE_FORMAT,
    HERMES,
    LFM2,
    LFM2_FORMAT,
    LLAMA3,
)
from rekindle.chat.dialects.harmony import HARMONY
from rekindle.chat.template.template import ChatTemplate
from rekindle.errors import StartupError


class Origin(StrEnum):
    SETTING = "setting"
    DERIVED = "derived"
    BY_HAND = "by hand"
    GENERIC = "generic"


@dataclass(frozen=True, slots=True)
class DialectChoice:
    dialect: Dialect
    origin: Origin
    line: str  # for the operator
    losses: tuple[str, ...] = ()  # what the template cannot write so that it reads back
    written: tuple[WrittenCalls, ...] = ()  # by the template: the grammar must accept them
    format: CallFormat | None = None  # of calls that the template does not write
    assumes_reasoning: bool = False  # its marks are the usual ones: the template shows none
    was_expected: bool = True  # False: the template has tools, but its calls cannot be read

    @property
    def describes_tools(self) -> bool:
        """Whether tools are described in the generic form instead of the template's."""
        return self.dialect.name == GENERIC.name


@dataclass(frozen=True, slots=True)
class _ByHand:
    """A dialect for templates that contain one of `signs`."""

    dialect: Dialect
    signs: tuple[str, ...]
    why: str
    format: CallFormat | None = None  # for templates that write no calls


_NO_CALLS = "the template writes no calls"

# These pass the same round trip as a derived dialect.
_BETTER = (
    _ByHand(HARMONY, ("<|channel|>",), "the model also writes calls in other orders"),
    _ByHand(LLAMA3, ("<|python_tag|>",), "the model also writes <|python_tag|> before a call"),
)
# For templates that describe tools and write no calls.
_UNWRITTEN = (
    _ByHand(LFM2, ("<|tool_list_start|>", "<|tool_call_start|>"), _NO_CALLS, LFM2_FORMAT),
    _ByHand(GRANITE, ("<|tool_call|>",), _NO_CALLS, GRANITE_FORMAT),
)

_NAMED = {each.name: each for each in (GENERIC, HERMES, HARMONY, LLAMA3, LFM2, GRANITE)}
NAMES = tuple(_NAMED)

# Marks that models write although their templates do not, by a sign that the template contains.
_THINK = ReasoningMarks("<think>", "</think>")
_REASONING = (("[THINK]", ReasoningMarks("[THINK]", "[/THINK]")),)

_derivations = Derivations()
_NO_PROOF = Derivation(None)


def chosen(dialect: Dialect) -> DialectChoice:
    """Return the choice of an operator who knows the dialect."""
    return DialectChoice(dialect, Origin.SETTING, f"{dialect.name}, by the setting")


def choose(template: ChatTemplate, *, name: str | None = None) -> DialectChoice:
    """Return the template's dialect, or the one of that name.

    Raises StartupError if there is none of that name.
    """
    derivation = _derivations.of(template)
    choice = _named(name, template) if name is not None else _for(template, derivation)
    if choice.dialect.name == HARMONY.name:
        return choice
    return replace(
        choice,
        dialect=_surrounded(choice.dialect, template, derivation),
        assumes_reasoning=derivation.surroundings.reasoning is None,
    )


def _named(name: str, template: ChatTemplate) -> DialectChoice:
    if name not in _NAMED:
        raise StartupError(f"Unknown tool dialect {name!r}. Known: {', '.join(NAMES)}.")
    formats = (row.format for row in _UNWRITTEN if row.dialect.name == name)
    return replace(chosen(_NAMED[name]), format=next(formats, None))


def _for(template: ChatTemplate, derivation: Derivation) -> DialectChoice:
    traits = template.traits
    if traits.tools and traits.calls:
        for each in _matching(_BETTER, template):
            proof = prove(template, each.dialect)
            if proof.dialect is not None:
                return _by_hand(each, proof)
    if derivation.dialect is not None:
        return DialectChoice(
            replace(derivation.dialect, parallel=derivation.is_parallel),
            Origin.DERIVED,
            derivation.reason,
            derivation.losses,
            derivation.written,
        )
    if traits.tools and not traits.calls:
        for each in _matching(_UNWRITTEN, template):
            return _by_hand(each)
    why = derivation.reason.removeprefix(f"{CANNOT}: ")
    return DialectChoice(
        GENERIC, Origin.GENERIC, f"generic form: {why}", was_expected=not traits.tools
    )


def _matching(rows: Iterable[_ByHand], template: ChatTemplate) -> Iterable[_ByHand]:
    return (row for row in rows if any(sign in template.source for sign in row.signs))


def _by_hand(row: _ByHand, proof: Derivation = _NO_PROOF) -> DialectChoice:
    line = f"{row.dialect.name}, by hand: {row.why}"
    return DialectChoice(row.dialect, Origin.BY_HAND, line, proof.losses, proof.written, row.format)


def apply(choice: DialectChoice, template: ChatTemplate) -> None:
    """Let the template write tools and calls in the chosen form, if it has none of its own."""
    if choice.dialect.name == GENERIC.name:
        template.write_tools_as_text()
    elif choice.format is not None:
        template.write_calls_as(choice.format)


def _surrounded(dialect: Dialect, template: ChatTemplate, derivation: Derivation) -> Dialect:
    """Add the marks of reasoning and the hidden headers that the template writes."""
    found = derivation.surroundings
    known = (marks for sign, marks in _REASONING if sign in template.source)
    return replace(
        dialect,
        reasoning=found.reasoning or next(known, _THINK),
        hidden=tuple(dict.fromkeys(dialect.hidden + found.hidden)),
        hidden_at_edges=tuple(dict.fromkeys(dialect.hidden_at_edges + found.hidden_at_edges)),
    )
