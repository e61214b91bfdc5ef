"""The sandbox that chat templates run in.

The sandbox offers the names of Hugging Face's `apply_chat_template`: templates rely on them.
"""

import json
import re
from datetime import datetime
from functools import partial
from typing import Any, Never

from jinja2 import TemplateError, Undefined
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment

from rekindle.chat.template.guard import SENTINEL_CLASS, Guard

Json = Any  # whatever json.loads returns

_MAX_REPEATED = 1_000_000  # characters or items; picked
_MAX_EXPONENT = 64
_TO_ESCAPE = re.compile(f"[^\\x00-\\x7f{SENTINEL_CLASS}]")


class Sandbox(SandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, guard: Guard) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=_Missing,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        self._guard = guard
        self.filters["tojson"] = tojson
        self.filters["safe"] = str  # Markup would escape added text, as for HTML.
        self.filters["replace"] = self._replace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def getattr(self, obj: Any, attribute: str) -> Any:
        if attribute == "replace" and isinstance(obj, str):
            return partial(self._replace, obj)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Limit `*` and `**`, which can fill the memory. Jinja2 limits `range` alone."""
        if operator == "**" and right > _MAX_EXPONENT:
            raise SecurityError("an exponent in the template is too large")
        if isinstance(left, str | list | tuple) and len(left) * right > _MAX_REPEATED:
            raise SecurityError("a repetition in the template is too long")
        return super().call_binop(context, operator, left, right)

    def _replace(self, text: object, old: str, new: str, count: int = -1) -> str:
        """Replace text, as templates do to remove switches (`/think`) from the client's text.

        Leave the text as it is if the replacement would form a control string.
        """
        before = str(text)
        after = before.replace(old, new, count)
        n_added = before.count(old) * self._guard.n_special(new)
        is_forged = self._guard.n_special(after) > self._guard.n_special(before) + n_added
        return before if is_forged else after


class _Missing(Undefined):
    """An undefined value that adds nothing to a text. Many tools lack an expected description."""

    def __add__(self, other: Json) -> Json:
        return other

    __radd__ = __add__


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks text for training. In a prompt it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def tojson(
    value: Json,
    *,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(
        value,
        ensure_ascii=False,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_to_json_value,
    )
    return _TO_ESCAPE.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _to_json_value(value: Json) -> Json:
    return None if isinstance(value, Undefined) else list(value)


def _raise_exception(message: str) -> Never:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
