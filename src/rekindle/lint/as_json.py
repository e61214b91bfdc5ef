"""The verdicts as JSON, and a fault as one sentence."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rekindle.lint.advice import advice_on, culprit_of
from rekindle.lint.audit import Fault
from rekindle.lint.baseline import LintVerdict


def json_of(verdicts: Sequence[LintVerdict]) -> dict[str, Any]:
    return {
        "passed": all(verdict.is_passed for verdict in verdicts),
        "traces": [_trace(verdict) for verdict in verdicts],
    }


def sentence_of(fault: Fault) -> str:
    """Say where, what, how often and at what cost."""
    n_times = len(fault.losses)
    times = "once" if n_times == 1 else f"{n_times} times"
    seconds = "" if fault.seconds is None else f", {fault.seconds:,.1f} s"
    return (
        f"{fault.change.kind} in {fault.change.where}: {fault.change.what}, {times};"
        f" {fault.n_lost:,} tokens prefilled again{seconds}."
    )


def _trace(verdict: LintVerdict) -> dict[str, Any]:
    audit = verdict.audit
    return {
        "trace": audit.name,
        "passed": verdict.is_passed,
        "amplification": audit.amplification,
        "allowed": verdict.allowed,
        "requests": audit.n_requests,
        "requests_unread": audit.n_unread,
        "lines_skipped": audit.n_skipped,
        "prompt_tokens": audit.n_prompt,
        "prefilled_tokens": audit.n_prefilled,
        "new_tokens": audit.n_new,
        "lost_tokens": audit.n_lost,
        "lost_seconds": audit.seconds_lost,
        "prefill_speed": audit.speed,
        "faults": [_fault(verdict, fault) for fault in audit.faults],
    }


def _fault(verdict: LintVerdict, fault: Fault) -> dict[str, Any]:
    return {
        **asdict(fault.change),
        "in_baseline": fault.key in verdict.known,
        "culprit": culprit_of(fault.change.kind),
        "advice": advice_on(fault.change.kind),
        "lost_tokens": fault.n_lost,
        "lost_seconds": fault.seconds,
        "requests": [
            {"name": loss.request.name, "line": loss.request.line, "lost_tokens": loss.n_lost}
            for loss in fault.losses
        ],
    }
