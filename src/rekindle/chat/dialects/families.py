"""Formats of calls that no template shows, as data."""

from dataclasses import replace

from rekindle.chat.dialects.call_format import (
    CallFormat,
    Members,
    MemberSlot,
    Nested,
    Slot,
    Strings,
    ValueForm,
)
from rekindle.chat.dialects.formatted import formatted

_NAME, _ARGUMENTS = Slot.NAME, Slot.ARGUMENTS

# Hermes, Qwen 2.5 and 3, and the many that copied them. `toolless` asks models for the same.
_HERMES = CallFormat(
    call=('<tool_call>\n{"name": "', _NAME, '", "arguments": ', _ARGUMENTS, "}\n</tool_call>"),
    separator="\n",
)
HERMES = formatted("hermes", _HERMES)
GENERIC = formatted("generic", _HERMES)
# Granite 3's template asks for answers in these tags.
GRANITE_FORMAT = CallFormat(
    opening="<|tool_call|>[",
    call=('{"name": "', _NAME, '", "arguments": ', _ARGUMENTS, "}"),
    separator=", ",
    closing="]",
)
GRANITE = replace(
    formatted("granite", GRANITE_FORMAT), hidden_at_edges=("<response>", "</response>")
)
LLAMA3 = formatted(
    "llama3",
    CallFormat(
        opening="<|python_tag|>",
        call=('{"name": "', _NAME, '", "parameters": ', _ARGUMENTS, "}"),
        separator="; ",
        at_start=True,
    ),
)
LFM2_FORMAT = CallFormat(
    opening="<|tool_call_start|>[",
    call=(_NAME, _ARGUMENTS),
    separator=", ",
    closing="]<|tool_call_end|>",
    members=Members(
        opening="(",
        member=(MemberSlot.KEY, "=", MemberSlot.VALUE),
        separator=", ",
        closing=")",
        value=ValueForm(
            strings=Strings.PYTHON,
            constants={True: "True", False: "False", None: "None"},
            nested=Nested.PYTHON,
        ),
    ),
)
LFM2 = formatted("lfm2", LFM2_FORMAT)
