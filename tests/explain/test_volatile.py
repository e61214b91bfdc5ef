"""Volatile text is found in the two texts of a miss."""

import pytest

from rekindle.explain.volatile import volatile_of
from rekindle.observe.request_record import Miss, MissReason

REST = ". You are a careful helper, and you answer in the fewest words that are enough"


def found(before: str, expected: str, got: str) -> tuple[str, str, str] | None:
    miss = Miss(
        reason=MissReason.SYSTEM_CHANGED,
        before=before,
        expected=(expected + REST)[:80],
        got=(got + REST)[:80],
        tokens_lost=100,
    )
    volatile = volatile_of(miss)
    return (volatile.kind, volatile.near, volatile.value) if volatile else None


@pytest.mark.parametrize(
    ("before", "expected", "got", "volatile"),
    [
        ("The time is 10:", "17:01", "18:44", ("clock", "The time is", "10:18:44")),
        ("It is 10:17:0", "1", "2", ("clock", "It is", "10:17:02")),
        ("now: 2026-11-15T10:17:", "01Z", "12Z", ("clock", "now", "2026-11-15T10:17:12Z")),
        ("At ", "9:59 AM", "10:02 AM", ("clock", "At", "10:02 AM")),
        ("now 17", "12345678.1", "22345679.2", ("clock", "now", "1722345679.2")),
        ("Today is ", "Monday", "Tuesday", ("date", "Today is", "Tuesday")),
        ("Today: 2026-11-1", "5", "6", ("date", "Today", "2026-11-16")),
        ("It is ", "October 31, 2026", "November 1, 2026", ("date", "It is", "November 1")),
        (
            "request ",
            "3f2504e0-4f89-11d3-9a0c-0305e82c3301",
            "a7c1ffe2-90ab-4c4d-8e55-1d2b6f00aa11",
            ("uuid", "request", "a7c1ffe2-90ab-4c4d-8e55-1d2b6f00aa11"),
        ),
        ("HEAD ", "3f2504e", "aa2504f", ("hash", "HEAD", "aa2504f")),
        ("open files: ", "9", "12", ("counter", "open files", "12")),
        ("open files: 1", "", "2", ("counter", "open files", "12")),
    ],
)
def test_a_volatile_span_is_named_by_what_it_looks_like(
    before: str, expected: str, got: str, volatile: tuple[str, str, str]
) -> None:
    assert found(before, expected, got) == volatile


def test_a_git_status_is_volatile_even_if_more_than_numbers_changed() -> None:
    miss = Miss(
        reason=MissReason.SYSTEM_CHANGED,
        before="gitStatus:\n",
        expected=" M src/a.py\n?? notes.md\nRecent commits:",
        got=" M src/b.py\nRecent commits:",
        tokens_lost=100,
    )
    volatile = volatile_of(miss)
    assert volatile is not None
    assert volatile.kind == "git status"


@pytest.mark.parametrize(
    ("before", "expected", "got"),
    [
        ("You are ", "a pirate", "a poet"),
        ("", "1. Do this first and then do that, then all of the rest", "2. Something else"),
        ("The limit is ", "10 and no more than that, ever, said one of the kings", "20 ships"),
        ("version ", "", "two"),
    ],
)
def test_a_text_with_another_meaning_is_not_volatile(before: str, expected: str, got: str) -> None:
    assert found(before, expected, got) is None


def test_a_miss_without_texts_is_not_volatile() -> None:
    assert volatile_of(Miss(reason=MissReason.EVICTED, tokens_lost=5)) is None
