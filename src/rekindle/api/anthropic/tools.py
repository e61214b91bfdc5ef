"""The tools of a request: those at the head of the prompt, and deferred ones."""

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.api.anthropic.schema import CountTokensRequest, MessagesTool
from rekindle.api.body import fault
from rekindle.api.tools import add_tool, check_parameters, nothing_to_call
from rekindle.chat.conversation import Conversation, Tool
from rekindle.chat.prompt.canonical_tools import canonical_definition
from rekindle.chat.reply.events import ToolChoice, ToolMode

MODES = {"auto": ToolMode.AUTO, "none": ToolMode.NONE, "any": ToolMode.REQUIRED}


@dataclass(frozen=True, slots=True)
class OfferedTools:
    head: tuple[Tool, ...]
    deferred: tuple[Tool, ...]

    def find(self, name: str) -> Tool | None:
        return next((tool for tool in (*self.head, *self.deferred) if tool.name == name), None)


def tools_of(entries: Sequence[MessagesTool]) -> OfferedTools:
    """Read the tools, except Anthropic's own: see `unsupported_tools`."""
    tools: dict[str, Tool] = {}
    deferred: set[str] = set()
    for index, entry in enumerate(entries):
        if not _is_custom(entry):
            continue
        tool = _tool(entry, f"tools.{index}")
        add_tool(tools, tool, f"tools.{index}.name")
        if entry.defer_loading:
            deferred.add(tool.name)
    return OfferedTools(
        head=tuple(tool for name, tool in tools.items() if name not in deferred),
        deferred=tuple(tool for name, tool in tools.items() if name in deferred),
    )


def unsupported_tools(body: CountTokensRequest) -> list[str]:
    """Name the tools whose schema or service only Anthropic has, as ignored fields."""
    return [
        f"tools.{entry.type}" for entry in body.tools or () if entry.type and not _is_custom(entry)
    ]


def tool_choice_of(body: CountTokensRequest, conversation: Conversation) -> ToolChoice:
    wanted = body.tool_choice
    if wanted is None:
        return ToolChoice()
    parallel = not wanted.disable_parallel_tool_use
    if wanted.type == "tool":
        name = wanted.name
        if name is None:
            raise fault("tool_choice.name", " is required.")
        if name not in {tool.name for tool in conversation.callable_tools}:
            raise fault("tool_choice.name", f": there is no tool `{name}` to call.")
        # Clients name a tool to get one value. Several calls must be allowed explicitly.
        once = wanted.disable_parallel_tool_use is not False
        return ToolChoice(ToolMode.REQUIRED, (name,), parallel=not once)
    mode = MODES[wanted.type]
    if mode is ToolMode.REQUIRED and not conversation.callable_tools:
        raise nothing_to_call()
    return ToolChoice(mode, parallel=parallel)


def _is_custom(entry: MessagesTool) -> bool:
    return entry.type in (None, "custom")


def _tool(entry: MessagesTool, path: str) -> Tool:
    if not entry.name:
        raise fault(f"{path}.name", " is required.")
    if entry.input_schema is None:
        raise fault(f"{path}.input_schema", " is required.")
    check_parameters(entry.input_schema, f"{path}.input_schema")
    function = {"name": entry.name, "parameters": entry.input_schema}
    if entry.description is not None:
        function["description"] = entry.description
    return Tool(entry.name, canonical_definition(function))
