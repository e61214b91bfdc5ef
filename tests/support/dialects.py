"""Dialects of published model families, by the marks in their templates."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from rekindle.chat.dialects.base import Dialect, ReasoningMarks
from rekindle.chat.dialects.call_format import (
    CallFormat,
    Members,
    MemberSlot,
    Nested,
    Slot,
    Strings,
    ValueForm,
)
from rekindle.chat.dialects.families import GRANITE, HERMES, LFM2, LLAMA3
from rekindle.chat.dialects.formatted import formatted
from rekindle.chat.dialects.harmony import HARMONY

T = TypeVar("T")

_NAME, _ARGUMENTS, _ID, _INDEX = Slot.NAME, Slot.ARGUMENTS, Slot.ID, Slot.INDEX
_KEY, _VALUE = MemberSlot.KEY, MemberSlot.VALUE

_OBJECT = ('{"name": "', _NAME, '", "arguments": ', _ARGUMENTS, "}")


def _listed(opening: str, closing: str) -> CallFormat:
    return CallFormat(opening=f"{opening}[", call=_OBJECT, separator=", ", closing=f"]{closing}")


NEMOTRON = formatted("nemotron", _listed("<TOOLCALL>", "</TOOLCALL>"))
PHI = formatted("granite", _listed("<|tool_call|>", "<|/tool_call|>"))
COMMAND_R = formatted(
    "command_r",
    CallFormat(
        opening="<|START_ACTION|>[\n    ",
        call=(
            '{"tool_call_id": "',
            _INDEX,
            '", "tool_name": "',
            _NAME,
            '", "parameters": ',
            _ARGUMENTS,
            "}",
        ),
        separator=",\n    ",
        closing="\n]<|END_ACTION|>",
    ),
)
# Mistral wrote a list until 2025, then a name and a mark for each call.
MISTRAL_LISTED = formatted(
    "mistral",
    CallFormat(
        opening="[TOOL_CALLS][",
        call=('{"name": "', _NAME, '", "arguments": ', _ARGUMENTS, ', "id": "', _ID, '"}'),
        separator=", ",
        closing="]",
        id_pattern="[a-zA-Z0-9]{9}",
    ),
)
MISTRAL = formatted("mistral", CallFormat(call=("[TOOL_CALLS]", _NAME, "[ARGS]", _ARGUMENTS)))
MISTRAL_WITH_ID = formatted(
    "mistral",
    CallFormat(
        call=("[TOOL_CALLS]", _NAME, "[CALL_ID]", _ID, "[ARGS]", _ARGUMENTS),
        id_pattern="[a-zA-Z0-9]{9}",
    ),
)
# Functionary 3.1, and Llama 3 in its custom format.
FUNCTIONARY = formatted(
    "functionary", CallFormat(call=("<function=", _NAME, ">", _ARGUMENTS, "</function>"))
)
KIMI = formatted(
    "kimi",
    CallFormat(
        opening="<|tool_calls_section_begin|>",
        call=(
            "<|tool_call_begin|>functions.",
            _NAME,
            ":",
            _INDEX,
            "<|tool_call_argument_begin|>",
            _ARGUMENTS,
            "<|tool_call_end|>",
        ),
        closing="<|tool_calls_section_end|>",
    ),
)


def _deepseek_mark(words: str) -> str:
    """Return a mark with a fullwidth bar, and a block character instead of the underscore."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_DEEPSEEK_CALL, _DEEPSEEK_END = _deepseek_mark("tool call begin"), _deepseek_mark("tool call end")
_DEEPSEEK_SEPARATOR = _deepseek_mark("tool sep")
# V3.1 writes the arguments bare, V3 and R1 put them into a Markdown block.
DEEPSEEK = formatted(
    "deepseek",
    CallFormat(
        opening=_deepseek_mark("tool calls begin"),
        call=(_DEEPSEEK_CALL, _NAME, _DEEPSEEK_SEPARATOR, _ARGUMENTS, _DEEPSEEK_END),
        closing=_deepseek_mark("tool calls end"),
    ),
)
DEEPSEEK_FENCED = formatted(
    "deepseek",
    CallFormat(
        opening=_deepseek_mark("tool calls begin"),
        call=(
            f"{_DEEPSEEK_CALL}function{_DEEPSEEK_SEPARATOR}",
            _NAME,
            "\n```json\n",
            _ARGUMENTS,
            f"\n```{_DEEPSEEK_END}",
        ),
        separator="\n",
        closing=_deepseek_mark("tool calls end"),
    ),
)

GLM = formatted(
    "glm",
    CallFormat(
        call=("<tool_call>", _NAME, "\n", _ARGUMENTS, "</tool_call>"),
        separator="\n",
        members=Members(
            member=("<arg_key>", _KEY, "</arg_key>\n<arg_value>", _VALUE, "</arg_value>\n")
        ),
    ),
)
MINIMAX = formatted(
    "minimax",
    CallFormat(
        opening="<minimax:tool_call>\n",
        call=('<invoke name="', _NAME, '">\n', _ARGUMENTS, "</invoke>"),
        separator="\n",
        closing="\n</minimax:tool_call>",
        members=Members(member=('<parameter name="', _KEY, '">', _VALUE, "</parameter>\n")),
    ),
)
# Qwen3-Coder, Qwen3.5, Nemotron 3: a tag per function and per parameter.
QWEN_XML = formatted(
    "qwen_xml",
    CallFormat(
        call=("<tool_call>\n<function=", _NAME, ">\n", _ARGUMENTS, "</function>\n</tool_call>"),
        separator="\n",
        members=Members(member=("<parameter=", _KEY, ">\n", _VALUE, "\n</parameter>\n")),
    ),
)
SEED = formatted(
    "qwen_xml",
    CallFormat(
        call=(
            "<seed:tool_call>\n<function=",
            _NAME,
            ">\n",
            _ARGUMENTS,
            "</function>\n</seed:tool_call>",
        ),
        separator="\n",
        members=Members(member=("<parameter=", _KEY, ">", _VALUE, "</parameter>\n")),
    ),
)

_PYTHON_CALL = Members(
    opening="(",
    member=(_KEY, "=", _VALUE),
    separator=", ",
    closing=")",
    value=ValueForm(
        strings=Strings.PYTHON,
        constants={True: "True", False: "False", None: "None"},
        nested=Nested.PYTHON,
    ),
)
# Gemma 3 has no format of its own, but some templates ask for Python in such a block.
TOOL_CODE = formatted(
    "gemma", CallFormat(call=("```tool_code\n", _NAME, _ARGUMENTS, "\n```"), members=_PYTHON_CALL)
)


def _gemma_members(mark: str) -> Members:
    return Members(
        opening="{",
        member=(_KEY, ":", _VALUE),
        separator=",",
        closing="}",
        value=ValueForm(strings=Strings.MARKED, string_marks=(mark, mark), nested=Nested.BARE),
        sorted_keys=True,
    )


GEMMA4 = formatted(
    "gemma",
    CallFormat(
        call=("<|tool_call>call:", _NAME, _ARGUMENTS, "<tool_call|>"),
        members=_gemma_members('<|"|>'),
    ),
)
FUNCTION_GEMMA = formatted(
    "gemma",
    CallFormat(
        call=("<start_function_call>call:", _NAME, _ARGUMENTS, "<end_function_call>"),
        members=_gemma_members("<escape>"),
    ),
)


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
    Family("deepseek", (f"{_BAR}>", "tool\u2581call"), DEEPSEEK, (("```json", DEEPSEEK_FENCED),)),
    Family("minimax", ("<minimax:tool_call>",), MINIMAX),
    Family("glm", ("<arg_key>",), GLM),
    Family("qwen_xml", ("<function=", "<parameter="), QWEN_XML, (("<seed:tool_call>", SEED),)),
    Family("functionary", ("<function=",), FUNCTIONARY),
    Family(
        "mistral",
        ("[TOOL_CALLS]",),
        MISTRAL_LISTED,
        (("[CALL_ID]", MISTRAL_WITH_ID), ("[ARGS]", MISTRAL)),
    ),
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

_THINK = ReasoningMarks("<think>", "</think>")  # models write it even without instruction

# By a sign that the template contains. The first match is used.
_REASONING = (
    ("<|channel>thought", ReasoningMarks("<|channel>thought\n", "<channel|>", anywhere=True)),
    ("<|START_THINKING|>", ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>")),
    ("<seed:think>", ReasoningMarks("<seed:think>", "</seed:think>")),
    ("[THINK]", ReasoningMarks("[THINK]", "[/THINK]")),
    ("<think>", _THINK),
    ("<reasoning>", ReasoningMarks("<reasoning>", "</reasoning>")),
)
_HIDDEN = (("<|START_RESPONSE|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),)
# Granite's template asks for answers in these.
_HIDDEN_AT_EDGES = (("<response></response>", ("<response>", "</response>")),)


def dialect_of(signs: str) -> Dialect:
    """Return the dialect of templates that contain these marks."""
    families = (each for each in _FAMILIES if all(sign in signs for sign in each.signs))
    family = next(families, Family("hermes", (), HERMES))
    dialect = _first(family.variants, signs, family.dialect)
    return replace(
        dialect,
        reasoning=dialect.reasoning or _first(_REASONING, signs, _THINK),
        hidden=dialect.hidden + _first(_HIDDEN, signs, ()),
        hidden_at_edges=dialect.hidden_at_edges + _first(_HIDDEN_AT_EDGES, signs, ()),
    )


def _first(rows: Iterable[tuple[str, T]], source: str, default: T) -> T:
    """Return the value of the first sign that the source contains."""
    return next((value for sign, value in rows if sign in source), default)
