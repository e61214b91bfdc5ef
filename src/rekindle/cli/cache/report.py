"""What `rekindle cache` prints: for the eye on a terminal, plain in a pipe, or as JSON."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.entry import ORDINARY, Key, Reason
from rekindle.cache.tools.archive import Exported, Imported
from rekindle.cache.tools.directory import Cleared, DirectoryFindings
from rekindle.cache.tools.inventory import Inventory, Listed
from rekindle.cache.tools.lineage import Stored
from rekindle.cache.tools.turn_upkeep import TurnTotals
from rekindle.cli.plain import (
    SHORT_KEY,
    SHORT_MODEL,
    ago,
    as_json,
    count,
    count_entries,
    filled_table,
    plain_console,
    print_pairs,
    until,
)

_FEW_TOKENS = 8
_HEADINGS = (
    *("key", "tokens", "size", "chain", "name", "session", "class", "pinned"),
    *("saved at", "last used", "uses", "model"),
)
_NUMBERS = {"tokens", "size", "chain", "uses"}
_OPTIONAL = {"name", "session", "class", "pinned"}  # most directories have nothing to say there


def list_json(stored: Stored, entries: Sequence[Listed]) -> str:
    names = stored.names_by_entry()
    return as_json([_summary(entry, names.get(entry.key, [])) for entry in entries])


def print_list(stored: Stored, entries: Sequence[Listed], turns: TurnTotals) -> None:
    inventory, names, now = stored.inventory, stored.names_by_entry(), time.time()
    rows = [_line(entry, names.get(entry.key, []), now) for entry in entries]
    console = plain_console()
    if rows:
        console.print(filled_table(_HEADINGS, rows, numbers=_NUMBERS, optional=_OPTIONAL))
    console.print(
        f"{count(len(inventory.tips()), 'conversation')}, {count_entries(len(inventory.entries))},"
        f" {count(inventory.n_tokens, 'token')}, {decimal(inventory.n_bytes)}"
    )
    n_lost = len(stored.names) - sum(map(len, names.values()))
    if n_lost:
        console.print(f"{count(n_lost, 'name')} of prompts that are not stored any more")
    if turns.n_turns:
        console.print(_turns(turns))


def _line(entry: Listed, names: Sequence[str], now: float) -> list[str]:
    header, retention = entry.row.header, entry.row.retention
    return [
        header.key.hex()[:SHORT_KEY],
        str(header.stop),
        decimal(entry.n_bytes),
        decimal(entry.chain_bytes) if entry.is_complete else "broken",
        ", ".join(names),
        retention.session if retention.session != ORDINARY.session else "",
        retention.rank.name.lower() if retention.rank != ORDINARY.rank else "",
        until(retention.pinned_until, now),
        _words(header.reason),
        ago(now - entry.row.last_used_at),
        str(entry.row.hits),
        header.fingerprint.hex()[:SHORT_MODEL],
    ]


def details_json(directory: Path, chain: Sequence[Listed], names: Sequence[str]) -> str:
    entry = chain[-1]
    header = entry.row.header
    return as_json(
        {
            **_summary(entry, names),
            "payload_bytes": header.payload_bytes,
            "compute_seconds": header.compute_seconds,
            "parents": [parent.key.hex() for parent in chain[:-1]],
            "token_ids": _token_ids(entry),
            "path": str(_path(directory, entry.key)),
        }
    )


def print_details(directory: Path, chain: Sequence[Listed], names: Sequence[str]) -> None:
    entry = chain[-1]
    header, retention = entry.row.header, entry.row.retention
    now = time.time()
    ids = [str(token) for token in _token_ids(entry)]
    if len(ids) > 2 * _FEW_TOKENS:
        ids[_FEW_TOKENS:-_FEW_TOKENS] = ["..."]
    print_pairs(
        (
            ("key", header.key.hex()),
            ("name", ", ".join(names) or "none"),
            ("session", retention.session),
            ("class", retention.rank.name.lower()),
            ("pinned", until(retention.pinned_until, now) or "no"),
            ("kind", header.kind.name.lower()),
            ("model", header.fingerprint.hex()),
            ("positions", f"{header.start} to {header.stop}"),
            ("token ids", " ".join(ids) or "none"),
            ("saved at", _words(header.reason)),
            ("created", ago(now - header.created_at)),
            ("last used", ago(now - entry.row.last_used_at)),
            ("uses", str(entry.row.hits)),
            ("took", f"{header.compute_seconds:.3f} s to compute"),
            ("payload", f"{header.payload_bytes} bytes"),
            ("on disk", f"{decimal(entry.n_bytes)}, with parents {decimal(entry.chain_bytes)}"),
            ("file", str(_path(directory, header.key))),
            ("follows", _lineage(chain)),
        )
    )


def findings_json(findings: DirectoryFindings, *, fixed: bool) -> str:
    return as_json(
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


def print_findings(findings: DirectoryFindings, *, fixed: bool) -> None:
    console = plain_console()
    for problem in findings.problems:
        detail = f" ({problem.detail})" if problem.detail else ""
        console.print(f"{problem.path}: {problem.flaw.value}{detail}", soft_wrap=True)
    console.print(f"Sound: {count_entries(findings.n_entries)}, {decimal(findings.n_bytes)}")
    if findings.turns.n_turns:
        console.print(f"Sound: {_turns(findings.turns)}")
    if findings.n_incomplete:
        lonely = count_entries(findings.n_incomplete)
        console.print(f"Of no use until what they follow is stored again: {lonely}")
    if findings.problems:
        done = "fixed" if fixed else "not fixed, see --fix"
        console.print(f"Wrong: {count(len(findings.problems), 'problem')}, {done}")


def pruned_json(inventory: Inventory, pruned: Sequence[Listed], *, dry_run: bool) -> str:
    n_bytes = sum(entry.n_bytes for entry in pruned)
    return as_json(
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
    plain_console().print(
        f"{freed} {decimal(n_bytes)} ({count_entries(len(pruned))});"
        f" {decimal(inventory.n_bytes - n_bytes)} ({count_entries(n_left)}) {stay}"
    )


def cleared_json(cleared: Cleared) -> str:
    return as_json({"files": cleared.n_files, "bytes": cleared.n_bytes})


def print_cleared(directory: Path, cleared: Cleared) -> None:
    plain_console().print(
        f"Deleted {count(cleared.n_files, 'file')}, {decimal(cleared.n_bytes)}, in {directory}",
        soft_wrap=True,
    )


def exported_json(path: Path, exported: Exported) -> str:
    manifest = exported.manifest
    return as_json(
        {
            "file": str(path),
            "bytes": exported.n_bytes,
            "tokens": exported.n_tokens,
            "fingerprint": manifest.fingerprint.hex(),
            "entries": len(manifest.entries),
            "keys": [packed.key.hex() for packed in manifest.entries],
            "names": [named.name for named in manifest.names],
        }
    )


def print_exported(path: Path, exported: Exported) -> None:
    manifest = exported.manifest
    names = ", ".join(named.name for named in manifest.names)
    named = f", named {names}" if names else ""
    plain_console().print(
        f"Wrote {path}: {count(exported.n_tokens, 'token')}{named},"
        f" {count_entries(len(manifest.entries))}, {decimal(exported.n_bytes)},"
        f" of the model {manifest.fingerprint.hex()[:SHORT_MODEL]}",
        soft_wrap=True,
    )


def imported_json(directory: Path, imported: Imported) -> str:
    manifest = imported.manifest
    return as_json(
        {
            "directory": str(directory),
            "fingerprint": manifest.fingerprint.hex(),
            "new_model": imported.is_new_model,
            "entries": len(manifest.entries),
            "bytes": manifest.n_bytes,
            "added": [key.hex() for key in imported.added],
            "names_added": list(imported.names_added),
            "names_kept": list(imported.names_kept),
        }
    )


def print_imported(directory: Path, imported: Imported) -> None:
    console, manifest = plain_console(), imported.manifest
    n_known = len(manifest.entries) - len(imported.added)
    there = f" ({n_known} more were there)" if n_known else ""
    model = manifest.fingerprint.hex()[:SHORT_MODEL]
    lines = [
        f"Added {count_entries(len(imported.added))}{there} of the model {model} to {directory}"
    ]
    if imported.names_added:
        lines.append(f"Named: {', '.join(imported.names_added)}")
    if imported.names_kept:
        lines.append(
            f"These stand for other prompts there, and stay: {', '.join(imported.names_kept)}"
        )
    if imported.is_new_model:
        lines.append(
            "Nothing of this model was there before: they are found by a server whose weights,"
            " KV types and llama.cpp are those they come from"
        )
    if imported.added or imported.names_added:
        lines.append("A server that is running finds them at its next start")
    for line in lines:
        console.print(line, soft_wrap=True)


def _summary(entry: Listed, names: Sequence[str]) -> dict[str, object]:
    header, retention = entry.row.header, entry.row.retention
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
        "names": list(names),
        "session": retention.session,
        "class": retention.rank.name.lower(),
        "pinned_until": retention.pinned_until or None,
    }


def _token_ids(entry: Listed) -> list[int]:
    ids: list[int] = np.frombuffer(entry.row.header.tokens, ">u4").tolist()
    return ids


def _lineage(chain: Sequence[Listed]) -> str:
    parents = [
        f"{parent.key.hex()[:SHORT_KEY]} (to {parent.row.header.stop})" for parent in chain[:-1]
    ]
    if not chain[0].is_complete:
        parents.insert(0, f"{chain[0].row.header.parent.hex()[:SHORT_KEY]} (not stored)")
    return "\n".join(reversed(parents)) or "nothing: it is the start of a prompt"


def _path(directory: Path, key: Key) -> Path:
    return EntryFiles(directory).path(key)


def _words(reason: Reason) -> str:
    return reason.name.lower().replace("_", " ")


def _turns(turns: TurnTotals) -> str:
    return f"{count(turns.n_turns, 'remembered turn')}, {decimal(turns.n_bytes)}"
