"""Tools, call ids and reply formats: rules that all wire formats share."""

import json
import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rekindle.api.body import fault
from rekindle.chat.conversation import Tool, ToolCall
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


class OpenCalls:
    """The calls of the last reply that have no result yet. Each question takes the same time."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, ToolCall] = OrderedDict()
        self._by_name: dict[str, deque[ToolCall]] = {}

    def begin(self, calls: Iterable[ToolCall]) -> None:
        self._by_id, self._by_name = OrderedDict(), {}
        for call in calls:
            self._by_id[call.id] = call
            self._by_name.setdefault(call.name, deque()).append(call)

    def answer(self, call_id: str) -> ToolCall | None:
        return self._by_id.pop(call_id, None)

    def answer_named(self, name: str | None) -> ToolCall | None:
        """Answer the first open call of that name."""
        waiting = self._by_name.get(name or "", ())
        while waiting:
            if (call := self._by_id.pop(waiting.popleft().id, None)) is not None:
                return call
        return None

    def answer_first(self) -> ToolCall | None:
        return self._by_id.popitem(last=False)[1] if self._by_id else None


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
