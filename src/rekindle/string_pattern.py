"""One regular expression for many strings, factored by their common prefixes."""

import re
from itertools import groupby
from operator import itemgetter
from os.path import commonprefix


def any_of(words: list[str]) -> str:
    """Return a pattern for the longest of the sorted `words`, of which there may be thousands."""
    prefix = commonprefix(words)  # noqa: RUF071 - strings, not paths
    rests = [word[len(prefix) :] for word in words if word != prefix]
    if not rests:
        return re.escape(prefix)
    branches = "|".join(any_of(list(group)) for _, group in groupby(rests, key=itemgetter(0)))
    optional = "?" if prefix in words else ""
    return f"{re.escape(prefix)}(?:{branches}){optional}"
