"""JSON that is written, and the errors of text that is not a call."""

import json
import re
from typing import Any, NoReturn

MAX_DEPTH = 128  # picked; a request that sends the call back may be 200 levels deep

# A surrogate pair, half of one (the group), or another escape.
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)


class NotACall(Exception):
    """The text begins like a call but is none. It stays text."""


class CutOff(NotACall):
    """The text ends within a call."""


def dump(value: Any) -> str:
    """Return the value as JSON. Raises NotACall if JSON cannot write a number, or if too deep."""
    if _is_too_deep(value):
        raise NotACall("too deep")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # fails for a lone surrogate, which must be escaped
        return text
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise NotACall(str(error)) from None


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def escaped(text: str) -> str:
    """Return text as it stands inside a JSON string."""
    return dump(text)[1:-1]


def without_halves(text: str, *, is_whole: bool) -> tuple[str, str]:
    """Return JSON with U+FFFD for each half of a surrogate pair, which is no valid text.

    Also return the text to hold back: a half at the end, unless the JSON is whole. The text must
    not end within an escape.
    """
    held = ""

    def mended(escape: re.Match[str]) -> str:
        nonlocal held
        if escape[1] is None:
            return escape[0]
        if escape.end() == len(text) and not is_whole:
            held = escape[0]
            return ""
        return r"\ufffd"

    return (_ESCAPE.sub(mended, text), held) if "\\u" in text else (text, "")


def no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
