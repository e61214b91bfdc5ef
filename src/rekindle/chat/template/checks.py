"""Limits of the filters and methods that one call can make slow or large."""

import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.utils import _PassArg, pass_context

from rekindle.chat.template.budget import Budget, check_length

Filter = Callable[..., Any]

# Filters for web pages. Chat templates have no use for them, and each would need limits.
FORBIDDEN = frozenset(
    (
        *("filesizeformat", "forceescape", "pprint", "random", "striptags", "urlencode"),
        *("urlize", "wordcount", "wordwrap", "xmlattr"),
    )
)
_MAX_WIDTH = 10_000  # columns, lines or digits; picked
WIDE = re.compile(r"\d{5}")
WIDE_FIELD = re.compile(r"\d{3}")
# A width or precision of five digits, or one that comes from the arguments.
_WIDE_CONVERSION = re.compile(r"%(?:\([^()%]*\))?[^a-zA-Z%(]*?(?:\d{5}|\*)")
_CONVERSION = re.compile(r"%(?:\([^()%]*\))?([^a-zA-Z%(]*)")
_DIGITS = re.compile(r"\d+")
_WIDTH_METHODS = frozenset(("center", "expandtabs", "ljust", "rjust", "zfill"))
_WIDTH_FILTERS = frozenset(("batch", "center", "indent", "round", "slice", "tojson", "truncate"))
_CASES = frozenset(("capitalize", "casefold", "lower", "swapcase", "title", "upper"))
_CASE_FACTOR = 3  # the most characters that one character becomes in another case
_MAX_TITLE = 1_000_000  # characters; the filter `title` makes a list of all words; picked
_MAX_TIME_FORM = 100  # characters of a format for the time; picked
# These compare, join or copy all items in one call.
_WHOLE = frozenset(
    (
        *("batch", "dictsort", "groupby", "join", "list", "max", "min", "reverse", "slice"),
        *("sort", "sum", "unique"),
    )
)
_PART_CHARACTERS = 64  # that a part of a split text takes in memory


def check_width(value: object) -> None:
    if isinstance(value, int) and abs(value) > _MAX_WIDTH:
        raise SecurityError(f"a width in the template is larger than {_MAX_WIDTH:,}")


def check_format(form: str, values: Any, budget: Budget) -> None:
    """Check `form % values`."""
    if _WIDE_CONVERSION.search(form):
        raise SecurityError("a width in the template is too large, or comes from a variable")
    if isinstance(values, dict):
        values = tuple(values.values())
    longest = max(map(budget.weigh, values if isinstance(values, tuple) else (values,)), default=0)
    widths = (int(n) for part in _CONVERSION.findall(form) for n in _DIGITS.findall(part))
    check_length(len(form) + form.count("%") * max(longest, *widths, 0))


def check_time_form(form: str) -> None:
    """Check a format for the time: the C library pads a field to any width."""
    if len(form) > _MAX_TIME_FORM or WIDE_FIELD.search(form):
        raise SecurityError("a format for the time is too long, or has a wide field")


def check_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    """Check a call of a method, where `args` include the values of keywords."""
    if name in ("encode", "translate"):
        raise SecurityError(f"templates may not call {name!r}")
    if name in _CASES:
        _check_case(text)
    elif name in _WIDTH_METHODS:
        for width in args:
            check_width(width)
        if name == "expandtabs":
            check_length(len(text) + text.count("\t") * (args[0] if args else 8))
    elif name in ("split", "rsplit"):
        separator = next((each for each in args if isinstance(each, str)), None)
        n_parts = text.count(separator) if separator else len(text) // 2
        check_length(len(text) + n_parts * _PART_CHARACTERS if n_parts > _MAX_WIDTH else 0)
    elif name == "splitlines":
        check_length(len(text) + text.count("\n") * _PART_CHARACTERS)


def check_join(separator: str, values: Iterable[Any], budget: Budget) -> Any:
    """Return the values as a list that can be joined."""
    items = realised(values, budget)
    check_length(budget.weigh(items) + len(items) * len(separator))
    return items


def bounded_filter(name: str, function: Filter, budget_of: Callable[[], Budget]) -> Filter:
    """Return the filter with limits. It takes the context, so Jinja never runs it at load."""
    passed = _PassArg.from_obj(function)

    @wraps(function)
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of()
        budget.tick()
        if name in _WHOLE:
            value = realised(value, budget)
            if name == "join":
                check_join(str(kwargs.get("d", args[0] if args else "")), value, budget)
            if name == "sum" and not isinstance(kwargs.get("start", (*args, 0, 0)[1]), int | float):
                raise SecurityError("only numbers can be added up")
        elif isinstance(value, list | tuple | dict):
            if name in ("string", "tojson"):
                budget.weigh(value)
        elif name == "format":
            check_format(str(value), kwargs or args, budget)
        elif name == "indent":
            _check_indent(str(value), *args, **kwargs)
        elif name in _CASES:
            _check_case(str(value))
            if name == "title" and len(str(value)) > _MAX_TITLE:
                raise SecurityError(f"a title is longer than {_MAX_TITLE:,} characters")
        if name in _WIDTH_FILTERS:
            for each in (*args, *kwargs.values()):
                check_width(each)
        match passed:
            case _PassArg.context:
                result = function(context, value, *args, **kwargs)
            case _PassArg.eval_context:
                result = function(context.eval_ctx, value, *args, **kwargs)
            case _PassArg.environment:
                result = function(context.environment, value, *args, **kwargs)
            case None:
                result = function(value, *args, **kwargs)
        return budget.charge(result)

    return pass_context(bounded)


def _check_case(text: str) -> None:
    check_length(len(text) * (1 if text.isascii() else _CASE_FACTOR))


def _check_indent(text: str, width: int | str = 4, *_: object, **__: object) -> None:
    n_columns = width if isinstance(width, int) else len(width)
    check_length(len(text) + (text.count("\n") + 1) * n_columns)


def realised(values: Iterable[Any], budget: Budget) -> Any:
    """Return a weighed list, tuple or dictionary of the values."""
    if isinstance(values, str):
        check_length(len(values) * _PART_CHARACTERS if len(values) > _MAX_WIDTH else 0)
    if not isinstance(values, list | tuple | dict):
        items = []
        for value in values:
            budget.tick()
            items.append(value)
        values = items
    budget.weigh(values)
    return values
