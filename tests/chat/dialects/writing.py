"""Calls as a template would write them, from plain values."""

import json
from typing import Any

from rekindle.chat.conversation import ToolCall
from rekindle.chat.dialects.call_format import CallFormat
from rekindle.chat.dialects.writing import calls_text

Calls = list[tuple[str, dict[str, Any]]]

CALL_ID = "abcdefghi"


def written(call_format: CallFormat, calls: Calls) -> str:
    made = (
        ToolCall(CALL_ID, name, json.dumps(arguments, ensure_ascii=False))
        for name, arguments in calls
    )
    return calls_text(call_format, list(made))
