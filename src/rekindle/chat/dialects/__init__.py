"""The dialects, and the choice of one by the chat template. Model names do not matter."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from rekindle.chat.dialects.base import Dialect, ReasoningMarks
from rekindle.chat.dialects.deepseek import BARE, FENCED
from rekindle.chat.dialects.functionary import FUNCTIONARY
from rekindle.chat.dialects.gemma import FUNCTION_GEMMA, GEMMA4
from rekindle.chat.dialects.glm import GLM
from rekindle.chat.dialects.harmony import HARMONY
from rekindle.chat.dialects.harmony import HIDDEN as HARMONY_HIDDEN
from rekindle.chat.dialects.harmony import REASONING as HARMONY_REASONING
from rekindle.chat.dialects.json_calls import COMMAND_R, GENERIC, GRANITE, HERMES, NEMOTRON, PHI
from rekindle.chat.dialects.kimi import KIMI
from rekindle.chat.dialects.llama3 import LLAMA3
from rekindle.chat.dialects.minimax import MINIMAX
from rekindle.chat.dialects.mistral import LISTED, NAMED
from rekindle.chat.dialects.pythonic import LFM2, TOOL_CODE
from rekindle.chat.dialects.qwen_xml import QWEN_XML, SEED
from rekindle.errors import StartupError

T = TypeVar("T")

GENERIC_NAME = "generic"


@dataclass(frozen=True, slots=True)
class Family:
    """Templates that contain all of `signs`."""

    name: str
    signs: tuple[str, ...]
    dialect: Dialect
    variants: tuple[tuple[str, Dialect], ...] = ()  # by a sign that the template contains too


_BAR = "\uff5c"  # DeepSeek's

# The first match is used: the later ones are less certain.
_FAMILIES = (
    Family("harmony", ("<|channel|>", "<|message|>"), HARMONY),
    Family("kimi", ("<|tool_calls_section_begin|>",), KIMI),
    Family("deepseek", (f"{_BAR}>", "tool\u2581call"), BARE, (("```json", FENCED),)),
    Family("minimax", ("<minimax:tool_call>",), MINIMAX),
    Family("glm", ("<arg_key>",), GLM),
    Family("qwen_xml", ("<function=", "<parameter="), QWEN_XML, (("<seed:tool_call>", SEED),)),
    Family("functionary", ("<function=",), FUNCTIONARY),
    Family("mistral", ("[TOOL_CALLS]",), LISTED, (("[ARGS]", NAMED),)),
    Family("command_r", ("<|START_ACTION|>",), COMMAND_R),
    Family("nemotron", ("<TOOLCALL>",), NEMOTRON),
    Family("lfm2", ("<|tool_list_start|>",), LFM2),
    Family("lfm2", ("<|tool_call_start|>",), LFM2),
    Family(
        "gemma",
        ("<|tool_call>",),
        GEMMA4,
        (("<start_function_call>", FUNCTION_GEMMA), ("tool_code", TOOL_CODE)),
    ),
    Family("gemma", ("<start_function_call>",), FUNCTION_GEMMA),
    Family("gemma", ("tool_code",), TOOL_CODE),
    Family("granite", ("<|tool_call|>",), GRANITE, (("<|/tool_call|>", PHI),)),
    Family("hermes", ("<tool_call>",), HERMES),
    Family("llama3", ("<|python_tag|>",), LLAMA3),
    Family("llama3", ("<|start_header_id|>", '"parameters"'), LLAMA3),
)

NAMES = (*dict.fromkeys(family.name for family in _FAMILIES), GENERIC_NAME)

_THINK = ReasoningMarks("<think>", "</think>")  # models write it even without instruction

# By a sign that the template contains. The first match is used.
_REASONING = (
    ("<|channel|>", HARMONY_REASONING),
    ("<|channel>thought", ReasoningMarks("<|channel>thought\n", "<channel|>", anywhere=True)),
    ("<|START_THINKING|>", ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>")),
    ("<seed:think>", ReasoningMarks("<seed:think>", "</seed:think>")),
    ("[THINK]", ReasoningMarks("[THINK]", "[/THINK]")),
    ("<think>", _THINK),
    ("<reasoning>", ReasoningMarks("<reasoning>", "</reasoning>")),
)
_HIDDEN = (
    ("<|channel|>", HARMONY_HIDDEN),
    ("<|START_RESPONSE|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
)
# Granite's template asks for answers in these.
_HIDDEN_AT_EDGES = (("<response></response>", ("<response>", "</response>")),)


def choose(template_source: str, *, supports_tools: bool, override: str | None = None) -> Dialect:
    """Return the template's dialect, or the one named by `override`.

    Raises StartupError if `override` is not one of NAMES.
    """
    dialect = _dialect(template_source, supports_tools=supports_tools, override=override)
    return replace(
        dialect,
        reasoning=_first(_REASONING, template_source, _THINK),
        hidden=dialect.hidden + _first(_HIDDEN, template_source, ()),
        hidden_at_edges=dialect.hidden_at_edges + _first(_HIDDEN_AT_EDGES, template_source, ()),
    )


def _dialect(source: str, *, supports_tools: bool, override: str | None) -> Dialect:
    if override is not None and override not in NAMES:
        raise StartupError(f"Unknown tool dialect {override!r}. Known: {', '.join(NAMES)}.")
    if override == GENERIC_NAME or (override is None and not supports_tools):
        return GENERIC
    for family in _FAMILIES:
        if family.name == override or (
            override is None and all(sign in source for sign in family.signs)
        ):
            return _first(family.variants, source, family.dialect)
    return HERMES


def _first(rows: Iterable[tuple[str, T]], source: str, default: T) -> T:
    """Return the value of the first sign that the source contains."""
    return next((value for sign, value in rows if sign in source), default)
