"""The faults as SARIF 2.1.0, which GitHub and others show beside the code."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from rekindle import __version__
from rekindle.lint.advice import MEANINGS, advice_on, culprit_of
from rekindle.lint.as_json import sentence_of
from rekindle.lint.audit import Fault
from rekindle.lint.baseline import LintVerdict
from rekindle.lint.faults import FaultKind

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
MAX_LOCATIONS = 10  # of one fault; GitHub reads as many


def sarif_of(verdicts: Sequence[LintVerdict], paths: Mapping[str, str]) -> dict[str, Any]:
    """Return the document. `paths`: the file of each trace, by its name."""
    driver = {
        "name": "rekindle lint",
        "version": __version__,
        "rules": [_rule(kind) for kind in FaultKind],
    }
    results = [
        _result(verdict, fault, paths[verdict.audit.name])
        for verdict in verdicts
        for fault in verdict.audit.faults
    ]
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _rule(kind: FaultKind) -> dict[str, Any]:
    return {
        "id": kind.value,
        "shortDescription": {"text": MEANINGS[kind]},
        "help": {"text": advice_on(kind)},
        "properties": {"culprit": culprit_of(kind)},
    }


def _result(verdict: LintVerdict, fault: Fault, path: str) -> dict[str, Any]:
    change = fault.change
    digest = blake2b(f"{verdict.audit.name} {fault.key}".encode(), digest_size=16)
    return {
        "ruleId": change.kind.value,
        "ruleIndex": list(FaultKind).index(change.kind),
        "level": "error" if verdict.is_error(fault) else "note",
        "message": {"text": f"{sentence_of(fault)} {advice_on(change.kind)}"},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": path},
                    "region": {"startLine": loss.request.line},
                },
                "logicalLocations": [{"name": change.where}],
            }
            for loss in fault.losses[:MAX_LOCATIONS]
        ],
        "partialFingerprints": {"rekindle/v1": digest.hexdigest()},
        "properties": {
            "lostTokens": fault.n_lost,
            "lostSeconds": fault.seconds,
            "expected": change.expected,
            "got": change.got,
        },
    }
