"""Tools, call ids and reply formats: rules that all wire formats share."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.api.body import fault
from rekindle.chat.conversation import Tool
from rekindle.chat.dialects.syntax.cursor import NAME_LIMIT, WORD_CHARACTER
from rekindle.chat.reply.events import ToolChoice, ToolMode
from rekindle.errors import InvalidRequest
from rekindle.generation.request import Grammar, GrammarKind

NAME = re.compile(f"{WORD_CHARACTER}+")


class CallIds:
    """The ids of earlier calls. Some clients change them: `call_1` comes back as `call1`."""

    def __init__(self) -> None:
        self._exact: set[str] = set()
        self._by_core: dict[str, str] = {}
        self._lone_without_id = False

    def add(self, ids: Sequence[str]) -> None:
        """Add the ids of one message's calls."""
        if not ids:
            return
        self._exact.update(ids)
        self._by_core.update((_core(each), each) for each in ids if _core(each))
        self._lone_without_id = list(ids) == [""]

    def find(self, call_id: str) -> str | None:
        """Return the original id of the call that a client refers to, or None."""
        if call_id in self._exact:
            return call_id
        if found := self._by_core.get(_core(call_id)):
            return found
        return "" if self._lone_without_id else None

    def resolve(self, call_id: str, path: str) -> str:
        """Return the original id, or raise InvalidRequest for an unknown one."""
        found = self.find(call_id)
        if found is None:
            raise fault(path, f": no earlier tool call in this request has the id `{call_id}`.")
        return found


def add_tool(tools: dict[str, Tool], tool: Tool, path: str) -> None:
    """Add a tool by its name. Raise InvalidRequest if the name is taken, or cannot be called."""
    if len(tool.name) > NAME_LIMIT:
        raise fault(path, f" should have at most {NAME_LIMIT} characters.")
    if not (NAME.fullmatch(tool.name) and tool.name.isprintable()):
        raise fault(
            path,
            f": {tool.name!r} cannot be called. A name has no white space, no quotes, no brackets"
            " and none of `,;=|`. Use letters, digits, `_`, `-`, `.`, `:` or `/`.",
        )
    if tool.name in tools:
        raise fault(path, f": there are two tools `{tool.name}`.")
    tools[tool.name] = tool


def check_parameters(schema: object, path: str) -> None:
    """Refuse a schema of arguments that are no object. They are one in every wire format."""
    if not isinstance(schema, dict):
        raise fault(path, " should be a JSON schema.")
    if isinstance(kind := schema.get("type"), str) and kind != "object":
        raise fault(f"{path}.type", f": arguments are an object, not `{kind:.80}`.")


def nothing_to_call() -> InvalidRequest:
    return fault("tool_choice", ": a call is required, but `tools` has nothing to call.")


def json_grammar(kind: str, schema: Mapping[str, Any] | None, path: str) -> Grammar | None:
    """Make the grammar of a reply format. Raise InvalidRequest without a required schema."""
    if kind == "text":
        return None
    if kind == "json_object":
        schema = schema or {"type": "object"}
    if schema is None:
        raise fault(path, " is required.")
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), field=path)


def check_grammar(
    grammar: Grammar | None, choice: ToolChoice, field: str, choice_field: str = "tool_choice"
) -> None:
    """Refuse a required call together with a reply format, which `field` asks for."""
    if grammar is not None and choice.mode is ToolMode.REQUIRED:
        raise fault(choice_field, f" that requires a call and `{field}` exclude each other.")


def _core(call_id: str) -> str:
    return "".join(filter(str.isalnum, call_id)).lower()
