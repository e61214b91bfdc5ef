"""Prompts that the embedded model answers with high confidence, for tests that compare replies.

At every token of the reply the best candidate is far ahead. Rows that were computed in other
chunks, or beside others in the context, differ in their last bits: where two candidates are
nearly equal that decides, and a reply from the cache may be another than the cold one.
`tests/server/test_clear_replies.py` holds the prompts to it.
"""

from collections.abc import Iterable

from tests.support.workloads import Message, assistant, user

MIN_LEAD = 1.0  # of the best candidate's logprob; noise moves it by up to 0.4, as measured
COUNTING = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,"
LINES = ("red green blue yellow", "the dog runs in the park")


def say(line: str) -> list[Message]:
    """Return a chat that asks the model to repeat a line. After examples it is sure of that."""
    return [*shown(), user(f"Say: {line}")]


def shown(ending: str = "") -> list[Message]:
    return [
        message
        for line in LINES
        for message in (user(f"Say: {line}{ending}"), assistant(f"{line}{ending}"))
    ]


def lead(scores: Iterable[float]) -> float:
    """How far the best of some candidates is ahead, by their logprobs."""
    first, second, *_ = sorted(scores, reverse=True)
    return first - second
