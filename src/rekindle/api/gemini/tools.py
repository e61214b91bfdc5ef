"""The functions of a Gemini request, and which of them may be called."""

from collections.abc import Sequence

from rekindle.api.body import fault
from rekindle.api.gemini.openapi_schema import json_schema_of
from rekindle.api.gemini.schema import FunctionDeclaration, GeminiTool, ToolConfig
from rekindle.api.tools import add_tool, check_parameters
from rekindle.chat.conversation import Tool
from rekindle.chat.prompt.canonical_tools import canonical_definition
from rekindle.chat.reply.events import ToolChoice, ToolMode

CHOICE = "toolConfig.functionCallingConfig"


def tools_of(entries: Sequence[GeminiTool]) -> tuple[Tool, ...]:
    tools: dict[str, Tool] = {}
    for index, entry in enumerate(entries):
        for place, declaration in enumerate(entry.function_declarations or ()):
            path = f"tools.{index}.functionDeclarations.{place}"
            add_tool(tools, _tool(declaration, path), f"{path}.name")
    return tuple(tools.values())


def unsupported_tools(entries: Sequence[GeminiTool]) -> list[str]:
    """Name the tools that run on Google's servers, as ignored fields."""
    fields = GeminiTool.model_fields
    return [
        f"tools.{fields[name].alias}"
        for entry in entries
        for name in sorted(entry.model_fields_set & fields.keys() - {"function_declarations"})
    ]


def tool_choice_of(config: ToolConfig | None, tools: Sequence[Tool]) -> ToolChoice:
    wanted = config.function_calling_config if config else None
    if wanted is None:
        return ToolChoice()
    names = tuple(dict.fromkeys(wanted.allowed_function_names or ()))
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            path = f"{CHOICE}.allowedFunctionNames"
            raise fault(path, f": there is no function `{name}` in `tools`.")
    match wanted.mode:
        case "ANY":
            if not tools:
                raise fault(f"{CHOICE}.mode", " is `ANY`, but `tools` has no function to call.")
            return ToolChoice(ToolMode.REQUIRED, names)
        case "NONE":
            return ToolChoice(ToolMode.NONE)
        case _:  # calls are always valid here, so `VALIDATED` is no different
            return ToolChoice(ToolMode.AUTO, names)


def _tool(declaration: FunctionDeclaration, path: str) -> Tool:
    if not declaration.name:
        raise fault(f"{path}.name", " is required.")
    function: dict[str, object] = {"name": declaration.name}
    if declaration.description is not None:
        function["description"] = declaration.description
    if declaration.parameters_json_schema is not None:
        function["parameters"] = declaration.parameters_json_schema
    elif declaration.parameters is not None:
        function["parameters"] = json_schema_of(declaration.parameters)
    check_parameters(function.get("parameters", {}), f"{path}.parameters")
    return Tool(declaration.name, canonical_definition(function))
