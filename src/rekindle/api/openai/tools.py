"""The tools of a chat request, and its tool choice."""

from collections.abc import Collection, Iterator, Sequence

from rekindle.api.body import fault
from rekindle.api.openai.schema import (
    ChatCompletionRequest,
    ToolChoiceEntry,
    ToolEntry,
    ToolReference,
)
from rekindle.api.tools import add_tool, check_parameters, nothing_to_call
from rekindle.chat.conversation import Tool
from rekindle.chat.prompt.canonical_tools import canonical_definition
from rekindle.chat.reply.events import ToolChoice, ToolMode


def tools_of(entries: Sequence[ToolEntry]) -> tuple[Tool, ...]:
    tools: dict[str, Tool] = {}
    for index, entry in enumerate(entries):
        path = f"tools.{index}"
        add_tool(tools, _tool(entry, path), f"{path}.function.name")
    return tuple(tools.values())


def tool_choice_of(body: ChatCompletionRequest, tools: Sequence[Tool]) -> ToolChoice:
    wanted = body.tool_choice
    if isinstance(wanted, ToolChoiceEntry):
        names = {tool.name for tool in tools}
        return _object_choice(wanted, names, parallel=body.parallel_tool_calls)
    mode = ToolMode(wanted or "auto")
    if mode is ToolMode.REQUIRED and not tools:
        raise nothing_to_call()
    return ToolChoice(mode, parallel=body.parallel_tool_calls is not False)


def _object_choice(
    wanted: ToolChoiceEntry, known: Collection[str], *, parallel: bool | None
) -> ToolChoice:
    references = list(_references(wanted))
    for path, name in references:
        if name not in known:
            raise fault(path, f": there is no tool `{name}` in `tools`.")
    names = tuple(dict.fromkeys(name for _, name in references))
    if wanted.allowed_tools is not None:
        mode = ToolMode(wanted.allowed_tools.mode)
        return ToolChoice(mode, names, parallel=parallel is not False)
    # OpenAI calls a named function exactly once, and clients rely on it.
    return ToolChoice(ToolMode.REQUIRED, names, parallel=parallel is True)


def _references(wanted: ToolChoiceEntry) -> Iterator[tuple[str, str]]:
    """Yield the path and the name of each tool in the choice."""
    if wanted.type == "function":
        yield _reference(wanted, "tool_choice")
        return
    if wanted.allowed_tools is None:
        path = "tool_choice.allowed_tools"
        raise fault(path, " is required.")
    for index, reference in enumerate(wanted.allowed_tools.tools):
        yield _reference(reference, f"tool_choice.allowed_tools.tools.{index}")


def _reference(reference: ToolReference | ToolChoiceEntry, path: str) -> tuple[str, str]:
    if reference.function is not None:
        return f"{path}.function.name", reference.function.name
    if reference.name is not None:
        return f"{path}.name", reference.name
    raise fault(f"{path}.function", " is required.")


def _tool(entry: ToolEntry, path: str) -> Tool:
    if entry.type != "function":
        raise fault(
            f"{path}.type", f": tools of type `{entry.type}` are not supported, only `function` is."
        )
    if entry.function is None:
        raise fault(f"{path}.function", " is required.")
    name = entry.function.get("name")
    if not isinstance(name, str) or not name:
        raise fault(f"{path}.function.name", " should be a valid string.")
    check_parameters(entry.function.get("parameters", {}), f"{path}.function.parameters")
    return Tool(name, canonical_definition(entry.function))
