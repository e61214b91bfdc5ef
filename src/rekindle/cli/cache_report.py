"""What `rekindle cache` prints: for the eye on a terminal, plain in a pipe, or as JSON."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from rekindle.cache.block import Key, Reason
from rekindle.cache.directory import Cleared, Findings
from rekindle.cache.inventory import Inventory, Listed
from rekindle.cache.tiers.entry_file import EntryFiles
from rekindle.cache.turn_upkeep import TurnTotals

_SHORT_KEY = 12  # hex digits; picked
_SHORT_MODEL = 8
_FEW_TOKENS = 8
_PIPE_WIDTH = 1000  # a pipe has no width of its own: nothing is folded there


def list_json(entries: Sequence[Listed]) -> str:
    return _json([_summary(entry) for entry in entries])


def print_list(inventory: Inventory, entries: Sequence[Listed], turns: TurnTotals) -> None:
    table = _table()
    for name in ("key", "tokens", "size", "chain", "saved at", "last used", "uses", "model"):
        is_number = name in ("tokens", "size", "chain", "uses")
        table.add_column(name, justify="right" if is_number else "left")
    now = time.time()
    for entry in entries:
        header = entry.row.header
        table.add_row(
            header.key.hex()[:_SHORT_KEY],
            str(header.stop),
            decimal(entry.n_bytes),
            decimal(entry.chain_bytes) if entry.is_complete else "broken",
            _words(header.reason),
            _ago(now - entry.row.last_used_at),
            str(entry.row.hits),
            header.fingerprint.hex()[:_SHORT_MODEL],
        )
    console = _console()
    if entries:
        console.print(table)
    console.print(
        f"{_count(len(inventory.tips()), 'conversation')}, {_entries(len(inventory.entries))},"
        f" {_count(inventory.n_tokens, 'token')}, {decimal(inventory.n_bytes)}"
    )
    if turns.n_turns:
        console.print(_turns(turns))


def details_json(directory: Path, chain: Sequence[Listed]) -> str:
    entry = chain[-1]
    header = entry.row.header
    return _json(
        {
            **_summary(entry),
            "payload_bytes": header.payload_bytes,
            "compute_seconds": header.compute_seconds,
            "parents": [parent.key.hex() for parent in chain[:-1]],
            "token_ids": _token_ids(entry),
            "path": str(_path(directory, entry.key)),
        }
    )


def print_details(directory: Path, chain: Sequence[Listed]) -> None:
    entry = chain[-1]
    header = entry.row.header
    now = time.time()
    ids = [str(token) for token in _token_ids(entry)]
    if len(ids) > 2 * _FEW_TOKENS:
        ids[_FEW_TOKENS:-_FEW_TOKENS] = ["..."]
    table = _table(show_header=False)
    for name, value in (
        ("key", header.key.hex()),
        ("kind", header.kind.name.lower()),
        ("model", header.fingerprint.hex()),
        ("positions", f"{header.start} to {header.stop}"),
        ("token ids", " ".join(ids) or "none"),
        ("saved at", _words(header.reason)),
        ("created", _ago(now - header.created_at)),
        ("last used", _ago(now - entry.row.last_used_at)),
        ("uses", str(entry.row.hits)),
        ("took", f"{header.compute_seconds:.3f} s to compute"),
        ("payload", f"{header.payload_bytes} bytes"),
        ("on disk", f"{decimal(entry.n_bytes)}, with parents {decimal(entry.chain_bytes)}"),
        ("file", str(_path(directory, header.key))),
        ("follows", _lineage(chain)),
    ):
        table.add_row(name, value)
    _console().print(table)


def findings_json(findings: Findings, *, fixed: bool) -> str:
    return _json(
        {
            "entries": findings.n_entries,
            "bytes": findings.n_bytes,
            "incomplete": findings.n_incomplete,
            "turns": findings.turns.n_turns,
            "turn_bytes": findings.turns.n_bytes,
            "problems": [
                {
                    "path": str(problem.path),
                    "flaw": problem.flaw.name.lower(),
                    "detail": problem.detail,
                    "fixed": fixed,
                }
                for problem in findings.problems
            ],
        }
    )


def print_findings(findings: Findings, *, fixed: bool) -> None:
    console = _console()
    for problem in findings.problems:
        detail = f" ({problem.detail})" if problem.detail else ""
        console.print(f"{problem.path}: {problem.flaw.value}{detail}", soft_wrap=True)
    console.print(f"Sound: {_entries(findings.n_entries)}, {decimal(findings.n_bytes)}")
    if findings.turns.n_turns:
        console.print(f"Sound: {_turns(findings.turns)}")
    if findings.n_incomplete:
        console.print(
            f"Of no use until what they follow is stored again: {_entries(findings.n_incomplete)}"
        )
    if findings.problems:
        done = "fixed" if fixed else "not fixed, see --fix"
        console.print(f"Wrong: {_count(len(findings.problems), 'problem')}, {done}")


def pruned_json(inventory: Inventory, pruned: Sequence[Listed], *, dry_run: bool) -> str:
    n_bytes = sum(entry.n_bytes for entry in pruned)
    return _json(
        {
            "dry_run": dry_run,
            "entries": len(pruned),
            "bytes": n_bytes,
            "entries_left": len(inventory.entries) - len(pruned),
            "bytes_left": inventory.n_bytes - n_bytes,
            "keys": [entry.key.hex() for entry in pruned],
        }
    )


def print_pruned(inventory: Inventory, pruned: Sequence[Listed], *, dry_run: bool) -> None:
    n_bytes = sum(entry.n_bytes for entry in pruned)
    n_left = len(inventory.entries) - len(pruned)
    freed, stay = ("Would free", "would stay") if dry_run else ("Freed", "stay")
    _console().print(
        f"{freed} {decimal(n_bytes)} ({_entries(len(pruned))});"
        f" {decimal(inventory.n_bytes - n_bytes)} ({_entries(n_left)}) {stay}"
    )


def cleared_json(cleared: Cleared) -> str:
    return _json({"files": cleared.n_files, "bytes": cleared.n_bytes})


def print_cleared(directory: Path, cleared: Cleared) -> None:
    _console().print(
        f"Deleted {_count(cleared.n_files, 'file')}, {decimal(cleared.n_bytes)}, in {directory}",
        soft_wrap=True,
    )


def _summary(entry: Listed) -> dict[str, object]:
    header = entry.row.header
    return {
        "key": header.key.hex(),
        "kind": header.kind.name.lower(),
        "fingerprint": header.fingerprint.hex(),
        "parent": header.parent.hex(),
        "start": header.start,
        "stop": header.stop,
        "bytes": entry.n_bytes,
        "chain_bytes": entry.chain_bytes,
        "complete": entry.is_complete,
        "reason": header.reason.name.lower(),
        "created_at": header.created_at,
        "last_used_at": entry.row.last_used_at,
        "uses": entry.row.hits,
    }


def _token_ids(entry: Listed) -> list[int]:
    ids: list[int] = np.frombuffer(entry.row.header.tokens, ">u4").tolist()
    return ids


def _lineage(chain: Sequence[Listed]) -> str:
    parents = [
        f"{parent.key.hex()[:_SHORT_KEY]} (to {parent.row.header.stop})" for parent in chain[:-1]
    ]
    if not chain[0].is_complete:
        parents.insert(0, f"{chain[0].row.header.parent.hex()[:_SHORT_KEY]} (not stored)")
    return "\n".join(reversed(parents)) or "nothing: it is the start of a prompt"


def _path(directory: Path, key: Key) -> Path:
    return EntryFiles(directory).path(key)


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def _words(reason: Reason) -> str:
    return reason.name.lower().replace("_", " ")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _entries(number: int) -> str:
    return "1 entry" if number == 1 else f"{number} entries"


def _turns(turns: TurnTotals) -> str:
    return f"{_count(turns.n_turns, 'remembered turn')}, {decimal(turns.n_bytes)}"


def _table(*, show_header: bool = True) -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=show_header)


def _console() -> Console:
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False)


def _json(value: object) -> str:
    return json.dumps(value, indent=2)
