"""The tools of a Responses request, and its tool choice."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.api.body import fault
from rekindle.api.responses.custom_formats import pattern_of
from rekindle.api.responses.schema import (
    CreateResponseRequest,
    CustomTool,
    FunctionTool,
    NamespaceTool,
    OtherTool,
    ResponseToolChoice,
    ToolEntry,
)
from rekindle.api.tools import add_tool, check_parameters, nothing_to_call
from rekindle.chat.conversation import Tool
from rekindle.chat.prompt.canonical_tools import canonical_definition
from rekindle.chat.reply.events import ToolChoice, ToolMode
from rekindle.chat.template.json_text import Json

# A custom tool takes free text. The model sees a function with this one argument.
CUSTOM_ARGUMENT = "input"
CUSTOM_PARAMETERS: dict[str, Json] = {
    "type": "object",
    "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
    "required": [CUSTOM_ARGUMENT],
    "additionalProperties": False,
}
CALLABLE = frozenset({"function", "custom"})


@dataclass(frozen=True, slots=True)
class Origin:
    """A tool as the client names it. The model uses the full name."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class Toolbox:
    tools: tuple[Tool, ...]
    origins: Mapping[str, Origin]  # by full name
    unsupported: tuple[str, ...]  # types that only the vendor's servers can run
    echo: tuple[dict[str, Any], ...]  # the tools as the client sent them

    def origin(self, full_name: str) -> Origin:
        return self.origins.get(full_name) or Origin(full_name)


def full_name(name: str, namespace: str | None) -> str:
    """Join namespace and name: two namespaces may have a tool of the same name."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def toolbox_of(entries: Sequence[ToolEntry]) -> Toolbox:
    tools: dict[str, Tool] = {}
    origins: dict[str, Origin] = {}
    unsupported: dict[str, None] = {}
    for path, entry, namespace in _members(entries):
        if isinstance(entry, OtherTool):
            unsupported[entry.type] = None
            continue
        name = full_name(entry.name, namespace)
        definition = _definition(name, entry)
        check_parameters(definition.get("parameters", {}), f"{path}.parameters")
        tool = Tool(name, canonical_definition(definition), _patterns(entry))
        add_tool(tools, tool, f"{path}.name")
        origins[name] = Origin(entry.name, namespace, is_custom=isinstance(entry, CustomTool))
    echo = tuple(
        entry.model_dump(mode="json", by_alias=True, exclude_unset=True) for entry in entries
    )
    return Toolbox(tuple(tools.values()), origins, tuple(unsupported), echo)


def tool_choice_of(body: CreateResponseRequest, toolbox: Toolbox) -> ToolChoice:
    wanted = body.tool_choice
    parallel = body.parallel_tool_calls is not False
    if isinstance(wanted, ResponseToolChoice):
        return _object_choice(wanted, toolbox, parallel=body.parallel_tool_calls)
    mode = ToolMode(wanted or "auto")
    if mode is ToolMode.REQUIRED and not toolbox.tools:
        if toolbox.unsupported:
            return ToolChoice(ToolMode.AUTO, parallel=parallel)
        raise nothing_to_call()
    return ToolChoice(mode, parallel=parallel)


def _object_choice(
    wanted: ResponseToolChoice, toolbox: Toolbox, *, parallel: bool | None
) -> ToolChoice:
    if wanted.type == "allowed_tools":
        mode = ToolMode(wanted.mode or "auto")
        names = tuple(
            _known(
                full_name(each.name or "", each.namespace), toolbox, f"tool_choice.tools.{index}"
            )
            for index, each in enumerate(wanted.tools or ())
            if each.type in CALLABLE
        )
        # Only tools of other servers are allowed, so none of the prompt's tools may be called.
        return ToolChoice(mode if names else ToolMode.NONE, names, parallel=parallel is not False)
    if wanted.type not in CALLABLE:
        return ToolChoice(ToolMode.AUTO, parallel=parallel is not False)
    name = _known(full_name(wanted.name or "", wanted.namespace), toolbox, "tool_choice")
    # As in chat completions: a named function is called exactly once.
    return ToolChoice(ToolMode.REQUIRED, (name,), parallel=parallel is True)


def _known(name: str, toolbox: Toolbox, path: str) -> str:
    if name not in toolbox.origins:
        raise fault(f"{path}.name", f": there is no tool `{name}` in `tools`.")
    return name


def _members(
    entries: Sequence[ToolEntry],
) -> Iterator[tuple[str, FunctionTool | CustomTool | OtherTool, str | None]]:
    for index, entry in enumerate(entries):
        path = f"tools.{index}"
        if isinstance(entry, NamespaceTool):
            for inner, member in enumerate(entry.tools):
                yield f"{path}.tools.{inner}", member, entry.name
        else:
            yield path, entry, None


def _definition(name: str, entry: FunctionTool | CustomTool) -> dict[str, Json]:
    definition: dict[str, Json] = {"name": name}
    if isinstance(entry, CustomTool):
        definition["description"] = _custom_description(entry)
        definition["parameters"] = CUSTOM_PARAMETERS
        return definition
    if entry.description is not None:
        definition["description"] = entry.description
    if entry.parameters is not None:
        definition["parameters"] = entry.parameters
    return definition


def _patterns(entry: FunctionTool | CustomTool) -> tuple[tuple[str, str], ...]:
    if not isinstance(entry, CustomTool) or entry.format is None or not entry.format.definition:
        return ()
    pattern = pattern_of(entry.format.syntax, entry.format.definition)
    return () if pattern is None else ((CUSTOM_ARGUMENT, pattern),)


def _custom_description(entry: CustomTool) -> str:
    description = entry.description or ""
    if entry.format is None or not entry.format.definition:
        return description
    grammar = f"`{CUSTOM_ARGUMENT}` follows this {entry.format.syntax or ''} grammar:".replace(
        "  ", " "
    )
    return f"{description}\n\n{grammar}\n{entry.format.definition}".lstrip()
