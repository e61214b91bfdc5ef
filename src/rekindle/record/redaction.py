"""Remove keys from what is recorded. A removed text is always replaced by the same constant.

The constant keeps prompts comparable: the same prompt is recorded in the same way.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from rekindle.replay.traffic import SENT_HEADERS

REDACTED = "[redacted]"
# Headers that are recorded with their values: they name the client, the caller or the format.
KEPT_HEADERS = SENT_HEADERS | {
    *("accept", "content-type", "content-encoding", "user-agent"),
    *("anthropic-version", "anthropic-beta", "openai-beta", "traceparent"),
}
KEPT_PARAMETERS = frozenset({"alt", "beta", "api-version", "stream"})
KEY_HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie")
KEY_PARAMETERS = ("key", "api_key", "access_token")
MIN_KEY_CHARACTERS = 8  # a shorter key, such as `none`, may be a word of a prompt; picked
# Members of a body whose values are keys, such as those of a remote tool server.
_SECRET_NAME = re.compile(
    r"authorization|(x[-_])?(goog[-_])?api[-_]?key|access[-_]?token|password|secret|cookie",
    re.IGNORECASE,
)
# Keys of known services, wherever they stand.
_KNOWN_KEYS = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{16,}|AIza[A-Za-z0-9_-]{30,}|gh[pousr]_[A-Za-z0-9]{30,}"
    r"|github_pat_\w{30,}|hf_[A-Za-z0-9]{30,}|xox[abprs]-[A-Za-z0-9-]{20,}"
    r"|gsk_[A-Za-z0-9]{30,}|(?:AKIA|ASIA)[A-Z0-9]{16})"
)


class Redaction:
    """Knows the keys of all requests so far: one may return in a later prompt."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def learn(self, headers: Mapping[str, str], query: str) -> None:
        values = [headers[name] for name in KEY_HEADERS if name in headers]
        parameters = dict(parse_qsl(query))
        values += [parameters[name] for name in KEY_PARAMETERS if name in parameters]
        words = {word for value in values for word in re.split(r"[\s;=,]+", value)}
        self._keys |= {word for word in words if len(word) >= MIN_KEY_CHARACTERS}

    def text(self, text: str) -> str:
        for key in self._keys:
            text = text.replace(key, REDACTED)
        return _KNOWN_KEYS.sub(REDACTED, text)

    def value(self, value: Any) -> Any:
        """Return a JSON value without keys."""
        match value:
            case str():
                return self.text(value)
            case list():
                return [self.value(each) for each in value]
            case dict():
                return {
                    self.text(name): REDACTED
                    if isinstance(each, str) and _SECRET_NAME.fullmatch(name)
                    else self.value(each)
                    for name, each in value.items()
                }
            case _:
                return value

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
