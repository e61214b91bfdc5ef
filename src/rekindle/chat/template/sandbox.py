"""The sandbox that chat templates run in.

The sandbox offers the names of Hugging Face's `apply_chat_template`: templates rely on them. It
bounds the time and the memory of a rendering: see `budget.py`.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Any, Never

from jinja2 import TemplateError, TemplateSyntaxError, Undefined
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

from rekindle.chat.template.bounded_code import BoundedCode
from rekindle.chat.template.budget import MAX_CHARACTERS, Budget, check_length
from rekindle.chat.template.checks import (
    FORBIDDEN,
    bounded_filter,
    check_format,
    check_join,
    check_method,
    check_time_form,
)
from rekindle.chat.template.formatter import BoundedFormatter
from rekindle.chat.template.guard import Guard
from rekindle.chat.template.json_text import Json, tojson

_MAX_REPEATED = 1_000_000  # characters or items; picked
_MAX_EXPONENT = 64
_MAX_SOURCE_TOKENS = 20_000  # of Jinja; published templates have up to 2,500; picked
_GROWING = frozenset(("append", "extend", "insert", "update", "setdefault"))
_SCOPES = ("_loop_vars", "_block_vars")  # arguments that Jinja adds to a call
_COMPARING = frozenset(("sort", "count", "index", "remove"))


class Sandbox(SandboxedEnvironment):
    code_generator_class = BoundedCode
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, guard: Guard) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=_Missing,
            finalize=self._finalize,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock, _SourceLimit],
        )
        self._guard = guard
        self._running = threading.local()
        self.filters["tojson"] = self._tojson
        self.filters["safe"] = str  # Markup would escape added text, as for HTML.
        self.filters["replace"] = self._replace
        self.filters = {
            name: bounded_filter(name, function, self._budget)
            for name, function in self.filters.items()
            if name not in FORBIDDEN
        }
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @contextmanager
    def bounded(self) -> Iterator[Budget]:
        """Give all that this thread renders inside the block one budget."""
        if hasattr(self._running, "budget"):
            yield self._budget()
            return
        self._running.budget = Budget()
        try:
            yield self._budget()
        finally:
            del self._running.budget

    def _budget(self) -> Budget:
        budget: Budget = self._running.budget
        return budget

    def tick(self) -> None:
        self._running.budget.tick()

    def made(self, value: Any) -> Any:
        return self._running.budget.charge(value)

    def joined_text(self, values: tuple[Any, ...]) -> str:
        """Return the text of `a ~ b ~ c`."""
        for value in values:
            self._finalize(value)
        return self.concat(list(map(str, values)))

    def concat(self, parts: Iterable[str]) -> str:
        """Join the text of a template, a macro or a block, up to a limit."""
        kept: list[str] = []
        n_left = MAX_CHARACTERS
        for part in parts:
            n_left -= len(part)
            if n_left < 0:
                check_length(MAX_CHARACTERS + 1)
            kept.append(part)
        return self.made("".join(kept))  # type: ignore[no-any-return]

    def _finalize(self, value: Any) -> Any:
        """Return the value, which becomes text now. Constants come while a template compiles."""
        if type(value) is not str and hasattr(self._running, "budget"):
            self._running.budget.weigh(value)
        return value

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        formatter = BoundedFormatter(self, self._budget)
        text: str = value.__self__
        if value.__name__ == "format_map":
            return lambda mapping: formatter.vformat(text, (), mapping)
        return lambda *args, **kwargs: formatter.vformat(text, args, kwargs)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = self._budget()
        budget.tick()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        values = (*args, *(value for key, value in kwargs.items() if key not in _SCOPES))
        if isinstance(owner, str):
            if name == "replace":
                obj = partial(self._replace, owner)
            elif name == "join" and len(args) == 1:
                args = (check_join(owner, args[0], budget),)
            else:
                check_method(owner, name, values)
        elif isinstance(owner, int) and name == "to_bytes":
            raise SecurityError("templates may not call 'to_bytes'")
        elif isinstance(owner, list | dict) and name in _GROWING:
            budget.grow(owner, *values)
        elif isinstance(owner, list) and name in _COMPARING:
            budget.weigh(owner)
        elif isinstance(obj, Macro) and (obj.catch_varargs or obj.catch_kwargs):
            budget.charge(values)
        result = super().call(context, obj, *args, **kwargs)
        if name in _GROWING:
            budget.weigh_again(owner)
        return budget.charge(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Limit operators that can fill the memory."""
        budget = self._budget()
        if operator == "**" and right > _MAX_EXPONENT:
            raise SecurityError("an exponent in the template is too large")
        elif operator == "%" and isinstance(left, str):
            check_format(left, right, budget)
        elif operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and len(text) * times > _MAX_REPEATED:
                    raise SecurityError("a repetition in the template is too long")
        return budget.charge(super().call_binop(context, operator, left, right))

    def added(self, left: Any, right: Any) -> Any:
        """Return `left + right`. Templates add strings more often than they do anything else."""
        if type(left) is list and type(right) is list:
            return self._budget().joined(left, right)
        return self._running.budget.charge(left + right)

    def _tojson(self, value: Json, **options: Any) -> str:
        return tojson(value, **options, tick=self.tick)

    def _replace(self, text: object, old: str, new: str, count: int = -1) -> str:
        """Replace text, as templates do to remove switches (`/think`) from the client's text.

        Leave the text as it is if the replacement would form a control string.
        """
        before = str(text)
        n_found = before.count(old)
        check_length(len(before) + n_found * len(new))
        after = before.replace(old, new, count)
        n_added = n_found * self._guard.n_special(new)
        is_forged = self._guard.n_special(after) > self._guard.n_special(before) + n_added
        return before if is_forged else after


class _Namespace(Namespace):
    """Namespaces hold each other, and their text would hold all of that."""

    def __repr__(self) -> str:
        return "<Namespace>"


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


class _SourceLimit(Extension):
    """Bounds the time to compile a template: 20,000 tokens take up to 3 s."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for n_before, token in enumerate(stream):
            if n_before == _MAX_SOURCE_TOKENS:
                raise TemplateSyntaxError(
                    f"the template has more than {_MAX_SOURCE_TOKENS:,} words and signs",
                    token.lineno,
                )
            yield token


def _raise_exception(message: str) -> Never:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    check_time_form(form)
    return datetime.now().strftime(form)
