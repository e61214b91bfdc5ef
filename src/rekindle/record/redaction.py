"""Remove keys from what is recorded. A removed text is always replaced by the same constant.

The constant keeps prompts comparable: the same prompt is recorded in the same way.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from rekindle.record.key_names import is_of_headers, is_of_key
from rekindle.replay.traffic import SENT_HEADERS

REDACTED = "[redacted]"
# Headers that are recorded with their values: they name the client, the caller or the format.
KEPT_HEADERS = SENT_HEADERS | {
    *("accept", "content-type", "content-encoding", "user-agent"),
    *("anthropic-version", "anthropic-beta", "openai-beta", "traceparent"),
}
KEPT_PARAMETERS = frozenset({"alt", "beta", "api-version", "stream"})
COOKIE_HEADER = "cookie"
KEY_HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
KEY_PARAMETERS = ("key", "api_key", "access_token")
# A shorter key, such as `none`, may be a word of a prompt. So may one without a digit, such as
# `placeholder`, up to the second length; picked.
MIN_KEY_CHARACTERS, MAX_WORD_CHARACTERS = 8, 15
# Keys of known services, wherever they stand.
_KNOWN_KEYS = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{16,}|AIza[A-Za-z0-9_-]{30,}|gh[pousr]_[A-Za-z0-9]{30,}"
    r"|github_pat_\w{30,}|hf_[A-Za-z0-9]{30,}|xox[abprs]-[A-Za-z0-9-]{20,}"
    r"|gsk_[A-Za-z0-9]{30,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|Bearer (?=[A-Za-z._~+/-]*[0-9])[A-Za-z0-9._~+/-]{16,}=*)"
)
_SCHEMA_MEMBERS = "properties"  # of a JSON schema: names that a tool declares


class Redaction:
    """Knows the keys of all requests so far: one may return in a later prompt."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def learn(self, headers: Mapping[str, str], query: str) -> None:
        parameters = dict(parse_qsl(query))
        values = [headers[name] for name in KEY_HEADERS if name in headers]
        values += [parameters[name] for name in KEY_PARAMETERS if name in parameters]
        words = {word for value in values for word in re.split(r"[\s;=,]+", value)}
        cookies = headers.get(COOKIE_HEADER, "").split(";")
        words |= {cookie.partition("=")[2].strip(' "') for cookie in cookies}
        self._keys |= {word for word in words if _may_be_key(word)}

    def text(self, text: str) -> str:
        for key in self._keys:
            text = text.replace(key, REDACTED)
        return _KNOWN_KEYS.sub(REDACTED, text)

    def value(self, value: Any, name: str = "") -> Any:
        """Return a JSON value without keys. `name`: of the member that has it."""
        match value:
            case str():
                return self.text(value)
            case list():
                return [self.value(each) for each in value]
            case dict():
                return {
                    self.text(each): self._member(each, inner, of=name)
                    for each, inner in value.items()
                }
            case _:
                return value

    def _member(self, name: str, value: Any, *, of: str) -> Any:
        if isinstance(value, dict):
            # A tool may have a parameter of this name.
            is_headers = is_of_headers(name) and of != _SCHEMA_MEMBERS
            return self._headers_in_body(value) if is_headers else self.value(value, name)
        if is_of_key(name):
            return _without_texts(value)
        if isinstance(value, list) and is_of_headers(name):
            return [self._header_line(each) for each in value]
        return self.value(value, name)

    def _headers_in_body(self, headers: Mapping[str, Any]) -> dict[str, Any]:
        return {
            self.text(name): self.value(value, name)
            if name.lower() in KEPT_HEADERS or isinstance(value, dict)
            else _without_texts(value)
            for name, value in headers.items()
        }

    def _header_line(self, value: Any) -> Any:
        """Return `Name: value`, or a pair, without its texts. A heading of a table stays."""
        is_heading = isinstance(value, str) and ":" not in value
        return self.value(value) if is_heading else _without_texts(value)

    def path(self, path: str, query: str) -> str:
        """Return the path with the names of all parameters, and the values of harmless ones."""
        parameters = [
            (name, value if name in KEPT_PARAMETERS else REDACTED)
            for name, value in parse_qsl(query, keep_blank_values=True)
        ]
        kept = self.text(path)
        return f"{kept}?{urlencode(parameters, safe='[]')}" if parameters else kept

    def headers(self, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
        return {
            name: self.text(value) if name in KEPT_HEADERS else REDACTED for name, value in headers
        }


def _may_be_key(word: str) -> bool:
    if len(word) < MIN_KEY_CHARACTERS:
        return False
    return len(word) > MAX_WORD_CHARACTERS or any(map(str.isdigit, word))


def _without_texts(value: Any) -> Any:
    match value:
        case str():
            return REDACTED
        case list():
            return [_without_texts(each) for each in value]
        case dict():
            return {name: _without_texts(each) for name, each in value.items()}
        case _:
            return value
