"""The output of `rekindle cache`: tables and sentences, or JSON."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.entry import ORDINARY, Reason
from rekindle.cache.tools.archive import Exported, Imported
from rekindle.cache.tools.directory import Cleared, DirectoryFindings
from rekindle.cache.tools.inventory import Inventory, Listed
from rekindle.cache.tools.lineage import Stored
from rekindle.cache.tools.turn_upkeep import TurnTotals
from rekindle.cli.plain import (
    SHORT_KEY,
    SHORT_MODEL,
    ago,
    count,
    count_entries,
    filled_table,
    plain_console,
    print_json,
    print_pairs,
    until,
)

_FEW_TOKENS = 8
_NUMBERS = {"tokens", "size", "chain", "uses"}
_OPTIONAL = {"name", "session", "class", "pinned"}  # empty in most directories


def report_list(
    stored: Stored, entries: Sequence[Listed], turns: TurnTotals, *, as_json: bool
) -> None:
    inventory, names, now = stored.inventory, stored.names_by_entry(), time.time()
    if as_json:
        print_json([_summary(entry, names.get(entry.key, [])) for entry in entries])
        return
    rows = [_line(entry, names.get(entry.key, []), now) for entry in entries]
    console = plain_console()
    if rows:
        console.print(filled_table(rows, numbers=_NUMBERS, optional=_OPTIONAL))
    console.print(
        f"{count(len(inventory.tips()), 'conversation')}, {count_entries(len(inventory.entries))},"
        f" {count(inventory.n_tokens, 'token')}, {decimal(inventory.n_bytes)}"
    )
    n_lost = len(stored.names) - sum(map(len, names.values()))
    if n_lost:
        console.print(f"{count(n_lost, 'name')} of prompts that are not stored any more")
    if turns.n_turns:
        console.print(_turns(turns))


def _line(entry: Listed, names: Sequence[str], now: float) -> dict[str, str]:
    header, retention = entry.row.header, entry.row.retention
    return {
        "key": header.key.hex()[:SHORT_KEY],
        "tokens": str(header.stop),
        "size": decimal(entry.n_bytes),
        "chain": decimal(entry.chain_bytes) if entry.is_complete else "broken",
        "name": ", ".join(names),
        "session": retention.session if retention.session != ORDINARY.session else "",
        "class": retention.rank.name.lower() if retention.rank != ORDINARY.rank else "",
        "pinned": until(retention.pinned_until, now),
        "saved at": _words(header.reason),
        "last used": ago(now - entry.row.last_used_at),
        "uses": str(entry.row.hits),
        "model": header.fingerprint.hex()[:SHORT_MODEL],
    }


def report_details(
    directory: Path, chain: Sequence[Listed], names: Sequence[str], *, as_json: bool
) -> None:
    entry = chain[-1]
    header, retention = entry.row.header, entry.row.retention
    token_ids: list[int] = np.frombuffer(header.tokens, ">u4").tolist()
    path = str(EntryFiles(directory).path(header.key))
    if as_json:
        print_json(
            {
                **_summary(entry, names),
                "payload_bytes": header.payload_bytes,
                "compute_seconds": header.compute_seconds,
                "parents": [parent.key.hex() for parent in chain[:-1]],
                "token_ids": token_ids,
                "path": path,
            }
        )
        return
    now = time.time()
    ids = [str(token) for token in token_ids]
    if len(ids) > 2 * _FEW_TOKENS:
        ids[_FEW_TOKENS:-_FEW_TOKENS] = ["..."]
    print_pairs(
        {
            "key": header.key.hex(),
            "name": ", ".join(names) or "none",
            "session": retention.session,
            "class": retention.rank.name.lower(),
            "pinned": until(retention.pinned_until, now) or "no",
            "kind": header.kind.name.lower(),
            "model": header.fingerprint.hex(),
            "positions": f"{header.start} to {header.stop}",
            "token ids": " ".join(ids) or "none",
            "saved at": _words(header.reason),
            "created": ago(now - header.created_at),
            "last used": ago(now - entry.row.last_used_at),
            "uses": str(entry.row.hits),
            "took": f"{header.compute_seconds:.3f} s to compute",
            "payload": f"{header.payload_bytes} bytes",
            "on disk": f"{decimal(entry.n_bytes)}, with parents {decimal(entry.chain_bytes)}",
            "file": path,
            "follows": _lineage(chain),
        }
    )


def report_findings(findings: DirectoryFindings, *, fixed: bool, as_json: bool) -> None:
    if as_json:
        print_json(
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
        return
    console = plain_console()
    for problem in findings.problems:
        detail = f" ({problem.detail})" if problem.detail else ""
        console.print(f"{problem.path}: {problem.flaw.value}{detail}", soft_wrap=True)
    console.print(f"Sound: {count_entries(findings.n_entries)}, {decimal(findings.n_bytes)}")
    if findings.turns.n_turns:
        console.print(f"Sound: {_turns(findings.turns)}")
    if findings.n_incomplete:
        incomplete = count_entries(findings.n_incomplete)
        console.print(f"Unusable until the entries before them are stored again: {incomplete}")
    if findings.problems:
        done = "fixed" if fixed else "not fixed, see --fix"
        console.print(f"Wrong: {count(len(findings.problems), 'problem')}, {done}")


def report_pruned(
    inventory: Inventory, pruned: Sequence[Listed], *, dry_run: bool, as_json: bool
) -> None:
    n_bytes = sum(entry.n_bytes for entry in pruned)
    n_left, n_bytes_left = len(inventory.entries) - len(pruned), inventory.n_bytes - n_bytes
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "entries": len(pruned),
                "bytes": n_bytes,
                "entries_left": n_left,
                "bytes_left": n_bytes_left,
                "keys": [entry.key.hex() for entry in pruned],
            }
        )
        return
    freed, stay = ("Would free", "would stay") if dry_run else ("Freed", "stay")
    plain_console().print(
        f"{freed} {decimal(n_bytes)} ({count_entries(len(pruned))});"
        f" {decimal(n_bytes_left)} ({count_entries(n_left)}) {stay}"
    )


def report_cleared(directory: Path, cleared: Cleared, *, as_json: bool) -> None:
    if as_json:
        print_json({"files": cleared.n_files, "bytes": cleared.n_bytes})
        return
    plain_console().print(
        f"Deleted {count(cleared.n_files, 'file')}, {decimal(cleared.n_bytes)}, in {directory}",
        soft_wrap=True,
    )


def report_exported(path: Path, exported: Exported, *, as_json: bool) -> None:
    manifest = exported.manifest
    names = [named.name for named in manifest.names]
    if as_json:
        print_json(
            {
                "file": str(path),
                "bytes": exported.n_bytes,
                "tokens": exported.n_tokens,
                "fingerprint": manifest.fingerprint.hex(),
                "entries": len(manifest.entries),
                "keys": [packed.key.hex() for packed in manifest.entries],
                "names": names,
            }
        )
        return
    named = f", named {', '.join(names)}" if names else ""
    plain_console().print(
        f"Wrote {path}: {count(exported.n_tokens, 'token')}{named},"
        f" {count_entries(len(manifest.entries))}, {decimal(exported.n_bytes)},"
        f" of the model {manifest.fingerprint.hex()[:SHORT_MODEL]}",
        soft_wrap=True,
    )


def report_imported(directory: Path, imported: Imported, *, as_json: bool) -> None:
    manifest = imported.manifest
    if as_json:
        print_json(
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
        return
    console = plain_console()
    for line in _import_lines(directory, imported):
        console.print(line, soft_wrap=True)


def _import_lines(directory: Path, imported: Imported) -> Iterator[str]:
    manifest = imported.manifest
    n_known = len(manifest.entries) - len(imported.added)
    there = f" ({n_known} more were there)" if n_known else ""
    model = manifest.fingerprint.hex()[:SHORT_MODEL]
    yield f"Added {count_entries(len(imported.added))}{there} of the model {model} to {directory}"
    if imported.names_added:
        yield f"Named: {', '.join(imported.names_added)}"
    if imported.names_kept:
        kept = ", ".join(imported.names_kept)
        yield f"These names belong to other prompts there, and stay: {kept}"
    if imported.is_new_model:
        yield (
            "The cache had no entry of this model before. Only a server with the same weights,"
            " KV types and llama.cpp finds them"
        )
    if imported.added or imported.names_added:
        yield "A running server finds them at its next start"


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


def _lineage(chain: Sequence[Listed]) -> str:
    parents = [
        f"{parent.key.hex()[:SHORT_KEY]} (to {parent.row.header.stop})" for parent in chain[:-1]
    ]
    if not chain[0].is_complete:
        parents.insert(0, f"{chain[0].row.header.parent.hex()[:SHORT_KEY]} (not stored)")
    return "\n".join(reversed(parents)) or "nothing: it starts a prompt"


def _words(reason: Reason) -> str:
    return reason.name.lower().replace("_", " ")


def _turns(turns: TurnTotals) -> str:
    return f"{count(turns.n_turns, 'remembered turn')}, {decimal(turns.n_bytes)}"
