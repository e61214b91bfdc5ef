"""Find volatile text: a clock, a counter or an id that changes from prompt to prompt.

The two texts of a miss show it: where they diverge, both have a word of the same kind, and the
text around it is equal.
"""

import re
from dataclasses import dataclass

from rekindle.observe.request_record import Miss

CUT_CHARACTERS = 24  # ignored at the end of both texts, where a word may be cut; picked
NEAR = re.compile(r"([A-Za-z_][\w ]{0,30}?)\W*$")

_WEEKDAY = r"(?:Mon|Tue(?:s)?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?"
    r"|Sep(?:tember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
_HEX = r"[0-9a-fA-F]"
# The first match names the kind.
_KINDS = {
    "uuid": rf"{_HEX}{{2,8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{6,12}}",
    "clock": r"(?:\d{2,4}-\d\d-\d\d[T ]|\b)\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?"
    r"(?:\s?[AaPp]\.?[Mm]\b)?|\b1\d{9}(?:\.\d+|\d{3}|\d{6}|\d{9})?\b",
    "date": rf"\d{{4}}-\d\d-\d\d|\d{{1,2}}[/.]\d{{1,2}}[/.]\d{{2,4}}"
    rf"|\b{_WEEKDAY}\b|\b{_MONTH}\b(?:\s\d{{1,2}}(?:st|nd|rd|th)?\b)?|\b\d{{1,2}}\.?\s{_MONTH}\b",
    "hash": r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,64}\b|\b(?=[A-F]*\d)[0-9A-F]{12,64}\b",
    "counter": r"\d+(?:[.,]\d+)*",
}
_PATTERNS = {kind: re.compile(pattern) for kind, pattern in _KINDS.items()}
_ANY = re.compile("|".join(f"(?:{pattern})" for pattern in _KINDS.values()))
_GIT = re.compile(
    r"\bgit ?status\b|\bgit log\b|\bcurrent branch\b|\brecent commits\b|\bworking tree\b"
    r"|^ ?(?:[MADRCU]{1,2}|\?\?) [\w./-]+$",
    re.IGNORECASE | re.MULTILINE,
)
GIT = "git status"


@dataclass(frozen=True, slots=True)
class Volatile:
    kind: str  # clock, date, uuid, hash, counter, git status
    near: str  # the words in front of it
    value: str  # its last value


def volatile_of(miss: Miss) -> Volatile | None:
    """Return the volatile text where the texts of a miss diverge. None: other text changed."""
    if not miss.expected or not miss.got:
        return None
    earlier, now = miss.before + miss.expected, miss.before + miss.got
    if _GIT.search(earlier) and _GIT.search(now):
        return Volatile(GIT, _near(miss.before), miss.got.partition("\n")[0])
    if not _is_same_around(earlier, now):
        return None
    place = len(miss.before)
    for kind, pattern in _PATTERNS.items():
        old, new = _covering(pattern, earlier, place), _covering(pattern, now, place)
        if old is not None and new is not None:
            return Volatile(kind, _near(now[: new.start()]), new[0])
    return None


def _covering(pattern: re.Pattern[str], text: str, place: int) -> re.Match[str] | None:
    return next((m for m in pattern.finditer(text) if m.start() <= place <= m.end()), None)


def _is_same_around(one: str, other: str) -> bool:
    """Whether the texts are equal apart from volatile words. Their cut ends do not count."""
    masked, masked_other = _ANY.sub("\0", one), _ANY.sub("\0", other)
    n_compared = min(len(masked), len(masked_other)) - CUT_CHARACTERS
    is_same_so_far = n_compared > 0 and masked[:n_compared] == masked_other[:n_compared]
    return is_same_so_far or masked == masked_other


def _near(before: str) -> str:
    found = NEAR.search(before)
    return found[1].strip() if found else ""
