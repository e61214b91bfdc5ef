"""`tojson` for templates, with limits."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import Undefined
from jinja2.exceptions import SecurityError

from rekindle.chat.template.budget import check_length
from rekindle.chat.template.guard import SENTINEL_CLASS

Json = Any  # whatever json.loads returns

_MAX_INDENT = 10_000  # characters; picked
_SHORT = 8  # characters of a separator; picked
_TO_ESCAPE = re.compile(f"[^\\x00-\\x7f{SENTINEL_CLASS}]{{1,4096}}")


def tojson(
    value: Json,
    *,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> str:
    """Return the value as JSON. `tick` is called often, and may raise an error."""
    n_columns = indent if isinstance(indent, int) else len(indent or "")
    n_between = max(map(len, separators or ("",)))
    if max(n_columns, n_between) > _MAX_INDENT:
        raise SecurityError(f"an indent or a separator is longer than {_MAX_INDENT:,}")
    encoder = json.JSONEncoder(
        ensure_ascii=False,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_to_json_value,
    )
    if indent is None and n_between <= _SHORT:
        text = encoder.encode(value)  # many times faster than its parts
    else:
        text = "".join(_counted(encoder.iterencode(value), tick))
    return "".join(_counted(_escaped(text), tick)) if ensure_ascii else text


def _counted(parts: Iterable[str], tick: Callable[[], None]) -> Iterator[str]:
    n_characters = 0
    for part in parts:
        tick()
        n_characters += len(part)
        check_length(n_characters)
        yield part


def _escaped(text: str) -> Iterator[str]:
    """Yield the text with escapes for all but ASCII and sentinels."""
    end = 0
    for match in _TO_ESCAPE.finditer(text):
        yield text[end : match.start()]
        yield json.dumps(match[0])[1:-1]
        end = match.end()
    yield text[end:]


def _to_json_value(value: Json) -> Json:
    return None if isinstance(value, Undefined) else list(value)
