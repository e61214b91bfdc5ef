"""One call in the words of every dialect, with what in a template tells the dialect."""

from dataclasses import dataclass
from typing import Any

from rekindle.chat.dialects.base import CallEnded, Dialect, ParsedCall
from rekindle.chat.dialects.syntax.lark import Schemas
from tests.support.dialects import dialect_of

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "metric": {"type": "boolean"},
            "unit": {"enum": ["c", "f"]},
        },
        "required": ["city", "days"],
    },
    "ping": {"type": "object", "properties": {}},
}

NAME = "get_weather"
ARGUMENTS = {"city": "Bonn", "days": 3, "metric": True}
JSON = '{"city": "Bonn", "days": 3, "metric": true}'

BAR, BLOCK = "\uff5c", "\u2581"


@dataclass(frozen=True)
class Case:
    id: str
    template: str  # enough of one
    call: str
    between: str = ""  # two calls
    opening: str = ""
    closing: str = ""
    parallel: bool = True

    @property
    def dialect(self) -> Dialect:
        return dialect_of(self.template)

    @property
    def text(self) -> str:
        return self.opening + self.call + self.closing

    @property
    def two(self) -> str:
        return self.opening + self.call + self.between + self.call + self.closing


@dataclass(frozen=True)
class ParsedCalls:
    calls: tuple[ParsedCall, ...]
    n_chars: int  # the length of their text


def read(dialect: Dialect, text: str, schemas: Schemas = SCHEMAS) -> ParsedCalls | None:
    """Read the calls at the beginning of the text; None: they have not ended."""
    reader = dialect.reader(schemas)
    parts = reader.feed(text)
    calls = tuple(part.call for part in parts if isinstance(part, CallEnded))
    return ParsedCalls(calls, len(text) - len(reader.rest)) if reader.is_done else None


def _deepseek(words: str) -> str:
    return f"<{BAR}{words.replace(' ', BLOCK)}{BAR}>"


_CALLS_BEGIN, _CALLS_END = _deepseek("tool calls begin"), _deepseek("tool calls end")
_BEGIN, _END = _deepseek("tool call begin"), _deepseek("tool call end")
_SEP = _deepseek("tool sep")

CASES = (
    Case(
        "hermes",
        "<tool_call>",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>',
        between="\n",
    ),
    Case(
        "qwen_xml",
        "<tool_call> <function= <parameter=",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=metric>\ntrue\n</parameter>\n"
        "</function>\n</tool_call>",
        between="\n",
    ),
    Case(
        "seed",
        "<seed:tool_call> <function= <parameter= <seed:think>",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Bonn</parameter>\n"
        "<parameter=days>3</parameter>\n<parameter=metric>true</parameter>\n"
        "</function>\n</seed:tool_call>",
        between="\n",
    ),
    Case(
        "llama3",
        "<|python_tag|>",
        f'{{"name": "get_weather", "parameters": {JSON}}}',
        between="; ",
    ),
    Case(
        "llama3-tagged",
        "<|python_tag|>",
        f'{{"type": "function", "name": "get_weather", "parameters": {JSON}}}',
        opening="<|python_tag|>",
        between="; ",
    ),
    Case(
        "mistral-list",
        "[TOOL_CALLS]",
        f'{{"name": "get_weather", "arguments": {JSON}, "id": "abcdefghi"}}',
        opening="[TOOL_CALLS][",
        between=", ",
        closing="]",
    ),
    Case(
        "mistral",
        "[TOOL_CALLS] [ARGS]",
        f"[TOOL_CALLS]get_weather[ARGS]{JSON}",
    ),
    Case(
        "mistral-id",
        "[TOOL_CALLS] [CALL_ID] [ARGS]",
        f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{JSON}",
    ),
    Case(
        "deepseek-v3",
        f"{_CALLS_BEGIN} ```json",
        f"{_BEGIN}function{_SEP}get_weather\n```json\n{JSON}\n```{_END}",
        opening=_CALLS_BEGIN,
        between="\n",
        closing=_CALLS_END,
    ),
    Case(
        "deepseek-v3.1",
        _CALLS_BEGIN,
        f"{_BEGIN}get_weather{_SEP}{JSON}{_END}",
        opening=_CALLS_BEGIN,
        closing=_CALLS_END,
    ),
    Case(
        "harmony",
        "<|channel|> <|message|>",
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{JSON}",
        opening="<|start|>assistant",
        parallel=False,
    ),
    Case(
        "harmony-recipient-first",
        "<|channel|> <|message|>",
        f"to=functions.get_weather<|channel|>commentary json<|message|>{JSON}",
        opening="<|start|>assistant ",
        parallel=False,
    ),
    Case(
        "gemma4",
        "<|tool_call> <|channel>thought",
        '<|tool_call>call:get_weather{city:<|"|>Bonn<|"|>,days:3,metric:true}<tool_call|>',
    ),
    Case(
        "function-gemma",
        "<start_function_call>",
        "<start_function_call>call:get_weather{city:<escape>Bonn<escape>,days:3,metric:true}"
        "<end_function_call>",
    ),
    Case(
        "tool-code",
        "tool_code",
        '```tool_code\nget_weather(city="Bonn", days=3, metric=True)\n```',
        parallel=False,
    ),
    Case(
        "glm",
        "<tool_call> <arg_key>",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "<arg_key>metric</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
        between="\n",
    ),
    Case(
        "kimi",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|>",
        opening="<|tool_calls_section_begin|>",
        closing="<|tool_calls_section_end|>",
    ),
    Case(
        "minimax",
        "<minimax:tool_call>",
        '<invoke name="get_weather">\n<parameter name="city">Bonn</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="metric">true</parameter>\n'
        "</invoke>",
        opening="<minimax:tool_call>\n",
        between="\n",
        closing="\n</minimax:tool_call>",
    ),
    Case(
        "granite",
        "<|tool_call|>",
        f'{{"name": "get_weather", "arguments": {JSON}}}',
        opening="<|tool_call|>[",
        between=", ",
        closing="]",
    ),
    Case(
        "phi",
        "<|tool_call|> <|/tool_call|>",
        f'{{"name": "get_weather", "arguments": {JSON}}}',
        opening="<|tool_call|>[",
        between=", ",
        closing="]<|/tool_call|>",
    ),
    Case(
        "command_r",
        "<|START_ACTION|> <|START_THINKING|> <|START_RESPONSE|>",
        f'{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {JSON}}}',
        opening="<|START_ACTION|>[\n    ",
        between=",\n    ",
        closing="\n]<|END_ACTION|>",
    ),
    Case(
        "nemotron",
        "<TOOLCALL>",
        f'{{"name": "get_weather", "arguments": {JSON}}}',
        opening="<TOOLCALL>[",
        between=", ",
        closing="]</TOOLCALL>",
    ),
    Case("functionary", "<function=", f"<function=get_weather>{JSON}</function>"),
    Case(
        "lfm2",
        "<|tool_list_start|>",
        'get_weather(city="Bonn", days=3, metric=True)',
        opening="<|tool_call_start|>[",
        between=", ",
        closing="]<|tool_call_end|>",
    ),
)
