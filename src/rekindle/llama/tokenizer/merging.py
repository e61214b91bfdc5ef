"""Bounds the time and memory that llama.cpp needs to merge the characters of a text into tokens.

A word is merged with a queue of all its pairs. A run that stays one word is one long queue: it
takes four times as long as the same bytes of prose. Numbers are in docs/decisions/0017.
"""

from rekindle.errors import InvalidRequest

# Of one text: 10 MB of prose (3 million tokens) or a run of 2.5 MB. Either takes 4 to 12 s.
MAX_COST = 10_000_000
RUN_COST = 4  # of a byte in a long run; other bytes cost 1
# Words of twice this size still cost little more than prose. A book in Chinese has a line break
# or a space in as many bytes.
RUN_BYTES = 10_000
_MAX_CHARACTER_BYTES = 4


def check_cost(text: str) -> None:
    """Raise InvalidRequest for a text that would take too long to merge."""
    if len(text) * _MAX_CHARACTER_BYTES * RUN_COST <= MAX_COST:
        return
    data = text.encode("utf-8", "replace")
    windows = (data[i : i + RUN_BYTES] for i in range(0, len(data), RUN_BYTES))
    in_runs = sum(len(window) for window in windows if _is_inside_a_run(window))
    if len(data) + (RUN_COST - 1) * in_runs > MAX_COST:
        raise InvalidRequest(
            f"The text has {len(data):,} bytes, {in_runs:,} of them in long runs without white"
            f" space or of white space alone. At most {MAX_COST:,} bytes are accepted in one text,"
            f" and a byte in such a run counts as {RUN_COST}."
            " Send less text at once, or break the runs up with spaces or line breaks."
        )


def _is_inside_a_run(window: bytes) -> bool:
    first_word = window.split(None, 1)[:1]  # searches no further than the first word
    return not first_word or len(first_word[0]) == len(window)
