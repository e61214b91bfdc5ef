"""The baseline file: what traces cost when it was written. The verdict compares with it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.bounded_file import read_file
from rekindle.errors import StartupError
from rekindle.lint.audit import Fault, TraceAudit

VERSION = 1
SLACK = 1.02  # a session that is recorded again differs a little; picked
DEFAULT_MAX = 1.1  # amplification without a baseline; picked
MAX_BYTES = 2**24
_DIGITS = 4


@dataclass(frozen=True, slots=True)
class Known:
    """One trace in a baseline."""

    amplification: float
    faults: frozenset[str]  # their keys


@dataclass(frozen=True, slots=True)
class LintVerdict:
    audit: TraceAudit
    allowed: float
    known: frozenset[str]  # keys of faults in the baseline

    @property
    def is_passed(self) -> bool:
        return self.audit.amplification <= self.allowed

    def is_error(self, fault: Fault) -> bool:
        """Return whether the fault is one for which the trace fails."""
        return not self.is_passed and fault.key not in self.known


def verdict_on(
    audit: TraceAudit, baseline: Mapping[str, Known] | None, max_amplification: float | None
) -> LintVerdict:
    """Compare with the limit and the baseline. Without either, DEFAULT_MAX is the limit."""
    known = (baseline or {}).get(audit.name)
    limits = [] if max_amplification is None else [max_amplification]
    if known is not None:
        limits.append(known.amplification * SLACK)
    allowed = min(limits, default=DEFAULT_MAX)
    return LintVerdict(audit, allowed, known.faults if known else frozenset())


def read_baseline(path: Path) -> dict[str, Known]:
    """Return the traces of the file by name. Raises StartupError."""
    try:
        content: Any = json.loads(read_file(path, MAX_BYTES, may_be_pipe=True))
        if content["version"] != VERSION:
            raise StartupError(f"{path} has another version: write it again.")
        return {
            str(name): Known(float(each["amplification"]), frozenset(map(str, each["faults"])))
            for name, each in content["traces"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StartupError(
            f"{path} is not a baseline: `rekindle lint --write-baseline` writes one."
        ) from error


def write_baseline(path: Path, audits: Sequence[TraceAudit]) -> None:
    """Write what the traces cost now. Raises StartupError."""
    traces = {
        audit.name: {
            "amplification": round(audit.amplification, _DIGITS),
            "faults": sorted(fault.key for fault in audit.faults),
        }
        for audit in audits
    }
    try:
        path.write_text(json.dumps({"version": VERSION, "traces": traces}, indent=2) + "\n")
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error.strerror}.") from error
