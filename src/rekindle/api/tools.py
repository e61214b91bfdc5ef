"""Checks on tools and tool choices that all wire formats share."""

from rekindle.chat.conversation import Tool
from rekindle.chat.reply.events import ToolChoice, ToolMode
from rekindle.errors import InvalidRequest
from rekindle.generation.request import Grammar


def add_tool(tools: dict[str, Tool], tool: Tool, path: str) -> None:
    """Add a tool by its name. Raise InvalidRequest if the name is taken."""
    if tool.name in tools:
        raise InvalidRequest(f"`{path}`: there are two tools `{tool.name}`.", path)
    tools[tool.name] = tool


def nothing_to_call() -> InvalidRequest:
    return InvalidRequest(
        "`tool_choice`: a call is required, but `tools` has nothing to call.", "tool_choice"
    )


def check_grammar(grammar: Grammar | None, choice: ToolChoice, field: str) -> None:
    """Refuse a reply format, which `field` asks for, together with a required call."""
    if grammar is not None and choice.mode is ToolMode.REQUIRED:
        raise InvalidRequest(
            f"`tool_choice` that requires a call and `{field}` exclude each other.", "tool_choice"
        )
