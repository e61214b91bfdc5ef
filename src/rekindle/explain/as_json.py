"""The findings as JSON, for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rekindle.explain.advice import advice_for, advice_on, place_of
from rekindle.explain.findings import Cost, Findings, MissGroup, VolatileSpan
from rekindle.explain.lookups import LookedUp
from rekindle.observe.request_record import Miss


def json_of(findings: Findings, n_skipped: int) -> dict[str, Any]:
    return {
        "replies": findings.n_replies,
        "lines_skipped": n_skipped,
        "seconds": round(findings.seconds, 3),
        "prompt_tokens": findings.n_prompt,
        "cached_tokens": findings.n_cached,
        "prefilled_tokens": findings.n_prefilled,
        "prefilled_twice_tokens": findings.n_recomputed,
        "lost_tokens": findings.n_lost,
        "reasons": {reason.value: n for reason, n in findings.reasons.items()},
        "volatile": [_volatile(span) for span in findings.volatile],
        "groups": [_group(group) for group in findings.groups],
    }


def json_of_lookups(lookups: Sequence[LookedUp]) -> dict[str, Any]:
    return {
        "requests": [
            {
                "name": each.name,
                "prompt_tokens": each.n_prompt,
                "prefilled_tokens": each.n_prefilled,
                "miss": asdict(each.miss) if each.miss else None,
                "advice": advice_for(each.miss) if each.miss else None,
            }
            for each in lookups
        ]
    }


def _volatile(span: VolatileSpan) -> dict[str, Any]:
    return {
        "kind": span.volatile.kind,
        "near": span.volatile.near,
        "values": list(span.values),
        "sessions": span.n_sessions,
        **_cost(span.cost),
        **_place(span.miss),
        "advice": advice_on(span),
    }


def _group(group: MissGroup) -> dict[str, Any]:
    return {
        "session": group.session,
        "kind": group.volatile.kind if group.volatile else None,
        **_cost(group.cost),
        **_place(group.miss),
        "last": asdict(group.miss),
        "advice": advice_on(group),
    }


def _cost(cost: Cost) -> dict[str, Any]:
    return {
        "times": cost.n_times,
        "tokens": cost.tokens,
        "tokens_in_last_hour": cost.tokens_in_last_hour,
        "tokens_per_hour": round(cost.tokens_per_hour, 1),
    }


def _place(miss: Miss) -> dict[str, Any]:
    return {
        "reason": miss.reason.value,
        "message": miss.message,
        "part": miss.part,
        "where": place_of(miss),
    }
