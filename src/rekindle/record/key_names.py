"""Names of members whose values are keys, such as `client_secret` or `GITHUB_TOKEN`."""

import re
from functools import lru_cache

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_HEADERS = "headers"
_SECRETS = frozenset(
    {
        *("authorization", "secret", "secrets", "credential", "credentials", "cookie", "cookies"),
        *("password", "passwords", "passwd", "passphrase", "apikey", "bearer"),
    }
)
# A name that ends in one of these names a key.
_TOKENS = frozenset({"token", "auth"})
# These words before `key` name a key; `prompt_cache_key` does not.
_KINDS_OF_KEYS = frozenset({"api", "access", "private", "auth", "subscription", "signing"})
# Tokens of a vocabulary, and places in a list.
_OTHER_TOKENS = frozenset(
    {
        *("bos", "eos", "eot", "pad", "unk", "mask", "sep", "cls", "stop", "special"),
        *("page", "next", "continuation", "sync", "first", "last", "per", "image", "audio"),
    }
)


@lru_cache(maxsize=1024)
def is_of_key(name: str) -> bool:
    words = _words(name)
    if not words:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] in _TOKENS:
        return before not in _OTHER_TOKENS
    if words[-1] == "key" and before in _KINDS_OF_KEYS:
        return True
    return not _SECRETS.isdisjoint(words)


@lru_cache(maxsize=1024)
def is_of_headers(name: str) -> bool:
    return _words(name)[-1:] == [_HEADERS]


def _words(name: str) -> list[str]:
    """Split at signs, and where a capital letter begins a word."""
    return [word.lower() for word in _WORD.findall(name)]
