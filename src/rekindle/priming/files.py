"""Files to prime, read as requests that compute a prompt and sample nothing.

The shape of a record decides: a recorded request of any wire format, a line of recorded
traffic (`{path, body, ...}`), or the short form `{system, tools, cache_key, model}`.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from rekindle.bounded_file import read_file, unpacked
from rekindle.errors import PrimeError
from rekindle.json_size import MAX_MEMBERS, MAX_VALUES, is_too_large
from rekindle.priming import plain_yaml

Body = dict[str, Any]

MAX_BYTES = 256 * 2**20  # of a file, also of what it holds packed; picked
MAX_REQUESTS = 100_000  # of a file; picked
STEM_CHARACTERS = 100  # of the file name in a cache key, which has 128 at most; picked
SUFFIXES = (".json", ".jsonl", ".yaml", ".yml", ".toml", ".md", ".txt")


@dataclass(frozen=True, slots=True)
class PrimeRequest:
    path: str  # of the endpoint
    body: Body
    name: str  # the file, with the line where it has several requests


@dataclass(frozen=True, slots=True)
class _PrimeFormat:
    path: str
    limit: str  # the field that says how many tokens to sample
    tells_progress: bool


_CHAT = _PrimeFormat("/v1/chat/completions", "max_tokens", tells_progress=True)
_COMPLETIONS = _PrimeFormat("/v1/completions", "max_tokens", tells_progress=True)
_RESPONSES = _PrimeFormat("/v1/responses", "max_output_tokens", tells_progress=False)
_MESSAGES = _PrimeFormat("/v1/messages", "max_tokens", tells_progress=False)
_FORMATS = (_CHAT, _COMPLETIONS, _RESPONSES, _MESSAGES)  # "completions" ends two of the paths

# Fields that only matter for sampling, or for the form of the reply.
_NOT_PRIMED = frozenset(
    {
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "prefill"),
        *("n", "best_of", "echo", "stop", "stop_sequences", "ignore_eos", "seed"),
        *("temperature", "top_k", "top_p", "min_p", "typical_p", "logit_bias"),
        *("repeat_penalty", "repetition_penalty", "repeat_last_n"),
        *("frequency_penalty", "presence_penalty", "logprobs", "top_logprobs"),
        *("response_format", "output_format", "text", "stream_options", "background"),
    }
)
# Fields of the short form besides `system` and `tools`: they shape the prompt, or name it.
_SHORT_FORM_EXTRAS = frozenset(
    {"cache_key", "model", "chat_template_kwargs", "enable_thinking", "reasoning_effort"}
)
_NO_KEY = re.compile(r"[^A-Za-z0-9._:/-]")  # characters not allowed in a cache key
_MAX_KEY_PARTS = 32
# tomllib takes quadratic time for a dotted key. Possessive, so that the search takes linear time.
_LONG_TOML_KEY = re.compile(
    r"""(?<![\w.-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){32,}+[^\n]{0,99}?[=\]]"""
)
_ANTHROPIC_FIELDS = frozenset({"system", "stop_sequences", "anthropic_version"})
_ANTHROPIC_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"})


def read_prime_file(path: Path) -> tuple[PrimeRequest, ...]:
    """Read a file or a pipe. Raises PrimeError, UnreadableFile."""
    return parse_prime_file(path, read_file(path, MAX_BYTES, may_be_pipe=True))


def parse_prime_file(path: Path, content: bytes) -> tuple[PrimeRequest, ...]:
    """Return the requests in `content`; only the name of `path` is used.

    Raises PrimeError; UnreadableFile for broken gzip.
    """
    inner = path
    if path.suffix == ".gz":
        inner = path.with_suffix("")
        content = unpacked(content, path, MAX_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PrimeError(f"{path} is not UTF-8 text.") from error
    asked = list(islice(_requests(inner, str(path), text), MAX_REQUESTS + 1))
    if len(asked) > MAX_REQUESTS:
        raise PrimeError(f"{path} has more than {MAX_REQUESTS:,} prompts. Split it.")
    if not asked:
        raise PrimeError(f"{path} holds no request that can be primed.")
    stem = _NO_KEY.sub("-", inner.stem)[:STEM_CHARACTERS]
    return tuple(
        PrimeRequest(
            wire_format.path,
            _priming(wire_format, body, stem if len(asked) == 1 else f"{stem}:{number}"),
            name,
        )
        for number, (name, wire_format, body) in enumerate(asked, start=1)
    )


def is_prime_file(path: Path) -> bool:
    """Return True if the name of the file has a known suffix."""
    inner = path.with_suffix("") if path.suffix == ".gz" else path
    return inner.suffix.lower() in SUFFIXES


def _requests(path: Path, shown: str, text: str) -> Iterator[tuple[str, _PrimeFormat, Body]]:
    for name, record in _records(path, shown, text):
        for wire_format, body in requests_of(record, name):
            yield name, wire_format, body


def _records(path: Path, shown: str, text: str) -> Iterator[tuple[str, object]]:
    match path.suffix.lower():
        case ".jsonl":
            for number, line in enumerate(text.split("\n"), start=1):
                if line.strip():
                    yield f"{shown}:{number}", _json(line, shown, first_line=number)
        case ".json":
            yield shown, _json(text, shown, first_line=1)
        case ".yaml" | ".yml":
            yield shown, _yaml(text, shown)
        case ".toml":
            yield shown, _toml(text, shown)
        case ".md" | ".txt":
            yield shown, {"system": text}
        case _:
            known = ", ".join(SUFFIXES)
            raise PrimeError(f"{shown}: a file to prime must end in one of {known}.")


def _json(text: str, shown: str, *, first_line: int) -> object:
    if is_too_large(text.encode(), MAX_MEMBERS, MAX_VALUES):
        raise PrimeError(f"{shown}:{first_line}: the JSON has more values than any request.")
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise PrimeError(f"{shown}:{line}: not valid JSON: {error.msg}.") from error
    except RecursionError as error:
        raise PrimeError(f"{shown}:{first_line}: the JSON is nested too deep.") from error
    except ValueError as error:  # a number with thousands of digits
        raise PrimeError(f"{shown}:{first_line}: not valid JSON: {error}.") from error
    return value


def _yaml(text: str, shown: str) -> object:
    _check_small(text, shown, "YAML")
    try:
        return plain_yaml.load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise PrimeError(f"{shown}:{line}: not valid YAML: {error.problem}.") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise PrimeError(f"{shown}: not valid YAML: {reason}.") from error


def _toml(text: str, shown: str) -> object:
    _check_small(text, shown, "TOML")
    if _LONG_TOML_KEY.search(text):
        raise PrimeError(f"{shown}: not valid TOML: a key has more than {_MAX_KEY_PARTS} parts.")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # its message has the line
        raise PrimeError(f"{shown}: not valid TOML: {error}.") from error


def _check_small(text: str, shown: str, kind: str) -> None:
    if len(text) > plain_yaml.MAX_BYTES:
        raise PrimeError(
            f"{shown}: {kind} is read up to {plain_yaml.MAX_BYTES >> 20} MiB. Use JSON instead."
        )


def requests_of(record: object, name: str) -> Iterator[tuple[_PrimeFormat, Body]]:
    """Yield the format and the body of each prompt in `record`. Raises PrimeError."""
    if not isinstance(record, dict):
        raise PrimeError(f"{name}: a request is an object, not a {type(record).__name__}.")
    if "path" in record and "body" in record:
        wire_format, body = _recorded(record), record["body"]
        if wire_format is None or not isinstance(body, dict):
            return  # traffic without a prompt, such as a list of models
    else:
        wire_format, body = _format_of(record), record
    if wire_format is None:
        wire_format, body = _CHAT, _short_form(record, name)
    _check_json(body, name)
    for one in _one_prompt_each(wire_format, body):
        yield wire_format, one


def _recorded(record: Mapping[str, Any]) -> _PrimeFormat | None:
    path = str(record["path"]).partition("?")[0].rstrip("/")
    if record.get("method", "POST") != "POST":
        return None
    return next((each for each in _FORMATS if path.endswith(each.path.removeprefix("/v1"))), None)


def _format_of(body: Mapping[str, Any]) -> _PrimeFormat | None:
    """Return the wire format of a request; None: it is in the short form."""
    if "messages" in body:
        return _MESSAGES if _is_anthropic(body) else _CHAT
    if "input" in body or "previous_response_id" in body:
        return _RESPONSES
    return _COMPLETIONS if "prompt" in body else None


def _is_anthropic(body: Mapping[str, Any]) -> bool:
    """Return True for fields that only Anthropic has. Without them, both formats agree."""
    tools = _dicts(body.get("tools"))
    blocks = [
        block
        for message in _dicts(body["messages"])
        for block in _dicts(message.get("content"))
        if block.get("type") in _ANTHROPIC_BLOCKS
    ]
    has_schemas = any("input_schema" in tool for tool in tools)
    return bool(_ANTHROPIC_FIELDS & body.keys() or has_schemas or blocks)


def _dicts(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _short_form(record: Mapping[str, Any], name: str) -> Body:
    """`instructions` is what the Responses API calls the system prompt."""
    known = {"system", "instructions", "tools"} | _SHORT_FORM_EXTRAS
    if unknown := sorted(record.keys() - known):
        raise PrimeError(
            f"{name}: this is not a request of any API, and {unknown[0]!r} is not a field of the"
            f" short form, which has {', '.join(sorted(known))}."
        )
    system = record.get("system", record.get("instructions"))
    if not isinstance(system, str) or not system.strip():
        raise PrimeError(f"{name}: `system` must be the text of the system prompt.")
    tools = [] if record.get("tools") is None else record["tools"]
    if not isinstance(tools, list):
        raise PrimeError(f"{name}: `tools` must be a list.")
    body: Body = {key: record[key] for key in _SHORT_FORM_EXTRAS & record.keys()}
    # The user's turn is empty but needed: some templates render tools only with a user's turn,
    # and others refuse a conversation without one.
    body["messages"] = [{"role": "system", "content": system}, {"role": "user", "content": ""}]
    if tools:
        body["tools"] = [
            _chat_tool(tool, f"{name}: `tools.{index}`") for index, tool in enumerate(tools)
        ]
    return body


def _chat_tool(tool: object, place: str) -> Body:
    """Return a tool in the form of chat completions, from OpenAI's two forms or Anthropic's."""
    if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
        return tool
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise PrimeError(f"{place} has no name.")
    function = {"name": tool["name"]}
    if "description" in tool:
        function["description"] = tool["description"]
    for key in ("input_schema", "parameters"):
        if key in tool:
            function["parameters"] = tool[key]
    return {"type": "function", "function": function}


def _check_json(body: Body, name: str) -> None:
    try:
        json.dumps(body, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:  # such as a date in YAML or TOML
        raise PrimeError(f"{name}: a value cannot be sent as JSON: {error}.") from error


def _one_prompt_each(wire_format: _PrimeFormat, body: Body) -> Iterator[Body]:
    """A completion may have several prompts; each is primed on its own."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt)
    if wire_format is _COMPLETIONS and several:
        yield from ({**body, "prompt": each} for each in prompt or ())
    else:
        yield body


def _priming(wire_format: _PrimeFormat, body: Body, key: str) -> Body:
    kept = {field: value for field, value in body.items() if field not in _NOT_PRIMED}
    primed: Body = {
        "cache_key": key,
        **kept,
        wire_format.limit: 0,
        "stream": True,
        "cache_prompt": True,
        "persist": True,
    }
    if wire_format.tells_progress:
        primed["return_progress"] = True
    if wire_format is _RESPONSES:
        primed["store"] = False  # there is no reply to store
    return primed
