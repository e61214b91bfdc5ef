"""Make a failing request smaller: without headers, without fields, while it still fails."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.campaigns.fuzz.case import Case, WireCase
from tests.campaigns.fuzz.grow.hostile import Json

MAX_ATTEMPTS = 300


def minimised(case: Case, still_fails: Callable[[Case], bool]) -> Case:
    """Return the smallest case found. A crash of the server leaves nothing to try on."""
    if not isinstance(case, WireCase) or case.pieces:
        return case
    n_attempts = 0
    smaller: WireCase | None = case
    while smaller is not None:
        case, smaller = smaller, None
        for candidate in _candidates(case):
            n_attempts += 1
            if n_attempts > MAX_ATTEMPTS:
                return case
            if still_fails(candidate):
                smaller = candidate
                break
    return case


def _candidates(case: WireCase) -> Iterator[WireCase]:
    for at in range(len(case.headers)):
        yield replace(case, headers=case.headers[:at] + case.headers[at + 1 :])
    try:
        body = json.loads(case.body)
    except ValueError:
        return
    for smaller in _smaller(body):
        yield replace(case, body=json.dumps(smaller).encode())


def _smaller(value: Json) -> Iterator[Json]:
    """Yield the value without each of its parts, then with each part made smaller."""
    match value:
        case dict():
            for name in value:
                yield {other: value[other] for other in value if other != name}
            for name, inner in value.items():
                yield from ({**value, name: each} for each in _smaller(inner))
        case list():
            if len(value) > 3:
                yield value[: len(value) // 2]
                yield value[len(value) // 2 :]
            for at in range(min(len(value), 20)):
                yield value[:at] + value[at + 1 :]
            for at, inner in enumerate(value[:20]):
                yield from ([*value[:at], each, *value[at + 1 :]] for each in _smaller(inner))
        case str() if len(value) > 1:
            yield value[: len(value) // 2]
            yield value[len(value) // 2 :]
