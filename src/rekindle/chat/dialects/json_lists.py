"""The dialects that differ only in the marks around a JSON list, and in its keys."""

from rekindle.chat.dialects.base import Dialect
from rekindle.chat.dialects.json_calls import list_dialect
from rekindle.chat.dialects.lark import Form

_CALL_ID = r'"\"tool_call_id\"" SPACE? ":" SPACE? /"[0-9]{1,3}"/ "," SPACE?'
_NUMBERED = Form(head=rf'"{{" SPACE? {_CALL_ID} "\"tool_name\""', arguments_key="parameters")

COMMAND_R = list_dialect(
    "command_r", opening="<|START_ACTION|>", closing="<|END_ACTION|>", form=_NUMBERED
)
NEMOTRON = list_dialect("nemotron", opening="<TOOLCALL>", closing="</TOOLCALL>")
GRANITE = list_dialect("granite", opening="<|tool_call|>", closing=None)
PHI = list_dialect("granite", opening="<|tool_call|>", closing="<|/tool_call|>")


def granite(template_source: str) -> Dialect:
    """Granite 3, which ends the turn behind the list, and Phi 4, which closes it."""
    return PHI if "<|/tool_call|>" in template_source else GRANITE
