"""A file to prime -> requests that compute its prompt and sample nothing.

What a file holds is found by its shape: a recorded request of any dialect, a line of recorded
traffic (`{path, body, ...}`), or the short form `{system, tools, cache_key, model}`.
"""

import gzip
import json
import re
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rekindle.errors import PrimeError

Body = dict[str, Any]

STEM_CHARACTERS = 100  # of a cache key, which has 128 at most; picked
SUFFIXES = (".json", ".jsonl", ".yaml", ".yml", ".toml", ".md", ".txt")


@dataclass(frozen=True, slots=True)
class PrimeRequest:
    path: str  # of the endpoint
    body: Body
    name: str  # the file, with the line where it has several requests


@dataclass(frozen=True, slots=True)
class _WireFormat:
    path: str
    limit: str  # the field that says how many tokens to sample
    tells_progress: bool


_CHAT = _WireFormat("/v1/chat/completions", "max_tokens", tells_progress=True)
_COMPLETIONS = _WireFormat("/v1/completions", "max_tokens", tells_progress=True)
_RESPONSES = _WireFormat("/v1/responses", "max_output_tokens", tells_progress=False)
_MESSAGES = _WireFormat("/v1/messages", "max_tokens", tells_progress=False)
_DIALECTS = (_CHAT, _COMPLETIONS, _RESPONSES, _MESSAGES)  # "completions" ends two of the paths

# What only matters once tokens are sampled, or says how the reply comes.
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
# What the short form may have beside `system` and `tools`: it shapes the prompt, or names it.
_SHORT_FORM_EXTRAS = frozenset(
    {"cache_key", "model", "chat_template_kwargs", "enable_thinking", "reasoning_effort"}
)
_NO_KEY = re.compile(r"[^A-Za-z0-9._:/-]")  # what a cache key may not have
_ANTHROPIC_FIELDS = frozenset({"system", "stop_sequences", "anthropic_version"})
_ANTHROPIC_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"})


def read_prime_file(path: Path) -> tuple[PrimeRequest, ...]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PrimeError(f"{path} cannot be read: {error.strerror}.") from error
    return parse_prime_file(path, content)


def parse_prime_file(path: Path, content: bytes) -> tuple[PrimeRequest, ...]:
    """`content` is the file's; of `path` only the name is used."""
    inner = path
    if path.suffix == ".gz":
        inner = path.with_suffix("")
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise PrimeError(f"{path} is not a gzip file: {error}.") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PrimeError(f"{path} is not UTF-8 text.") from error
    records = list(_records(inner, str(path), text))
    asked = [
        (name, dialect, body)
        for name, record in records
        for dialect, body in requests_of(record, name)
    ]
    if not asked:
        raise PrimeError(f"{path} holds no request that can be primed.")
    stem = _NO_KEY.sub("-", inner.stem)[:STEM_CHARACTERS]
    return tuple(
        PrimeRequest(
            dialect.path,
            _priming(dialect, body, stem if len(asked) == 1 else f"{stem}:{number}"),
            name,
        )
        for number, (name, dialect, body) in enumerate(asked, start=1)
    )


def is_prime_file(path: Path) -> bool:
    """Whether its name is that of a file we can read."""
    inner = path.with_suffix("") if path.suffix == ".gz" else path
    return inner.suffix.lower() in SUFFIXES


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
            raise PrimeError(f"{shown}: the name of a file to prime ends in one of {known}.")


def _json(text: str, shown: str, *, first_line: int) -> object:
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise PrimeError(f"{shown}:{line}: not valid JSON: {error.msg}.") from error
    except RecursionError as error:
        raise PrimeError(f"{shown}:{first_line}: the JSON is nested too deep.") from error
    return value


def _yaml(text: str, shown: str) -> object:
    try:
        value: object = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise PrimeError(f"{shown}:{line}: not valid YAML: {error.problem}.") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise PrimeError(f"{shown}: not valid YAML: {error}.") from error
    return value


def _toml(text: str, shown: str) -> object:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:  # its message has the line
        raise PrimeError(f"{shown}: not valid TOML: {error}.") from error


def requests_of(record: object, name: str) -> Iterator[tuple[_WireFormat, Body]]:
    if not isinstance(record, dict):
        raise PrimeError(f"{name}: a request is an object, not a {type(record).__name__}.")
    if "path" in record and "body" in record:
        dialect, body = _recorded(record), record["body"]
        if dialect is None or not isinstance(body, dict):
            return  # traffic that computes no prompt, such as a list of models
    else:
        dialect, body = _dialect_of(record), record
    if dialect is None:
        dialect, body = _CHAT, _short_form(record, name)
    _check_json(body, name)
    for one in _one_prompt_each(dialect, body):
        yield dialect, one


def _recorded(record: Mapping[str, Any]) -> _WireFormat | None:
    path = str(record["path"]).partition("?")[0].rstrip("/")
    if record.get("method", "POST") != "POST":
        return None
    return next((each for each in _DIALECTS if path.endswith(each.path.removeprefix("/v1"))), None)


def _dialect_of(body: Mapping[str, Any]) -> _WireFormat | None:
    """None: it is in the short form."""
    if "messages" in body:
        return _MESSAGES if _is_anthropic(body) else _CHAT
    if "input" in body or "previous_response_id" in body:
        return _RESPONSES
    return _COMPLETIONS if "prompt" in body else None


def _is_anthropic(body: Mapping[str, Any]) -> bool:
    """Without any of these signs both dialects mean the same prompt."""
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
            f"{name}: this is no request of any API, and {unknown[0]!r} is not part of the short"
            f" form, which has {', '.join(sorted(known))}."
        )
    system = record.get("system", record.get("instructions"))
    if not isinstance(system, str) or not system.strip():
        raise PrimeError(f"{name}: `system` should be the text of the system prompt.")
    tools = [] if record.get("tools") is None else record["tools"]
    if not isinstance(tools, list):
        raise PrimeError(f"{name}: `tools` should be a list.")
    body: Body = {key: record[key] for key in _SHORT_FORM_EXTRAS & record.keys()}
    # The user's turn is there because some templates show tools only beside one, and others
    # refuse a conversation without any.
    body["messages"] = [{"role": "system", "content": system}, {"role": "user", "content": ""}]
    if tools:
        body["tools"] = [
            _chat_tool(tool, f"{name}: `tools.{index}`") for index, tool in enumerate(tools)
        ]
    return body


def _chat_tool(tool: object, place: str) -> Body:
    """OpenAI's two forms of a tool and Anthropic's, as chat completions have it."""
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
    except (TypeError, ValueError) as error:  # YAML and TOML have dates
        raise PrimeError(f"{name}: a value cannot be sent as JSON: {error}.") from error


def _one_prompt_each(dialect: _WireFormat, body: Body) -> Iterator[Body]:
    """A completion may ask for several prompts; each is primed by itself."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt)
    if dialect is _COMPLETIONS and several:
        yield from ({**body, "prompt": each} for each in prompt or ())
    else:
        yield body


def _priming(dialect: _WireFormat, body: Body, key: str) -> Body:
    kept = {field: value for field, value in body.items() if field not in _NOT_PRIMED}
    primed: Body = {
        "cache_key": key,
        **kept,
        dialect.limit: 0,
        "stream": True,
        "cache_prompt": True,
        "persist": True,
    }
    if dialect.tells_progress:
        primed["return_progress"] = True
    if dialect is _RESPONSES:
        primed["store"] = False  # there is no reply to go on from
    return primed
