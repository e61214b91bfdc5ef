"""`rekindle cache --url`: what a running server has stored, and letting it forget some of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal

from rekindle.cli.plain import (
    SHORT_KEY,
    ago,
    as_json,
    count,
    count_entries,
    filled_table,
    plain_console,
    plain_table,
    until,
    without_empty_columns,
)
from rekindle.cli.remote import Remote
from rekindle.cli.top.snapshot import SHARED
from rekindle.errors import StartupError

_MOST_LISTED = 1000  # more than that the server does not tell
_MOST_NAMED = 8
_NUMBERS = {"tokens", "size", "uses"}
_OPTIONAL = {"name", "pinned"}

Prefix = dict[str, Any]  # an element of `data` in the reply to GET /v1/cache


def stored_at(remote: Remote) -> dict[str, Any]:
    reply = remote.get("/v1/cache", limit=_MOST_LISTED)
    if not isinstance(reply, dict) or not isinstance(reply.get("data"), list):
        raise StartupError(f"{remote.url} does not answer like a server of ours.")
    return reply


def print_stored(reply: dict[str, Any]) -> None:
    now = time.time()
    headings, rows = without_empty_columns(
        [
            *("key", "name", "tokens", "size", "tiers", "session", "class"),
            *("last used", "uses", "pinned"),
        ],
        [_line(prefix, now) for prefix in reply["data"]],
        optional=_OPTIONAL,
    )
    table = filled_table(headings, rows, _NUMBERS)
    console = plain_console()
    if rows:
        console.print(table)
    console.print(
        "; ".join(
            [
                count(len(rows), "prompt"),
                *map(_usage, reply["usage"]),
            ]
        )
    )


def one_stored(remote: Remote, key: str) -> Prefix:
    """By its name, or by how its key starts."""
    prefixes: list[Prefix] = stored_at(remote)["data"]
    found = [each for each in prefixes if each["name"] == key] or [
        each for each in prefixes if each["key"] and each["key"].startswith(key.lower())
    ]
    if len({each["key"] for each in found}) == 1:
        return found[0]
    if not found:
        raise StartupError(f"Nothing at {remote.url} has a name {key!r}, or a key that starts so.")
    some = ", ".join(each["key"] for each in found[:_MOST_NAMED])
    raise StartupError(f"{len(found)} keys at {remote.url} start so, among them {some}.")


def print_prefix(prefix: Prefix) -> None:
    now = time.time()
    table = plain_table(show_header=False)
    for name, value in (
        ("key", prefix["key"] or "not stored any more"),
        ("name", prefix["name"] or "none"),
        ("session", prefix["session"]),
        ("class", prefix["class"]),
        ("pinned", until(prefix["pinned_until"], now) or "no"),
        ("tokens", str(prefix["tokens"])),
        ("size", f"{decimal(prefix['bytes'])}, with all that it follows"),
        ("tiers", ", ".join(prefix["tiers"]) or "none has all of it"),
        ("last used", ago(now - prefix["last_used"])),
        ("uses", str(prefix["hits"])),
    ):
        table.add_row(name, value)
    plain_console().print(table)


def to_prune(prefixes: Sequence[Prefix], *, used_before: float, now: float) -> list[Prefix]:
    """Conversations that were not used since; what has a name or is pinned stays."""
    named = {each["key"] for each in prefixes if each["name"] is not None}
    return [
        each
        for each in prefixes
        if each["key"]
        and each["key"] not in named
        and each["last_used"] < used_before
        and (each["pinned_until"] or 0) <= now
    ]


@dataclass(frozen=True, slots=True)
class Pruned:
    keys: tuple[str, ...]  # of conversations
    n_entries: int  # that are gone; 0 when it was only tried
    dry_run: bool


def prune_at(remote: Remote, *, used_before: float, dry_run: bool) -> Pruned:
    doomed = to_prune(stored_at(remote)["data"], used_before=used_before, now=time.time())
    n_entries = 0
    for prefix in () if dry_run else doomed:
        deleted = remote.delete(f"/v1/cache/{prefix['key']}")
        n_entries += deleted["deleted"] if deleted is not None else 0
    return Pruned(tuple(prefix["key"] for prefix in doomed), n_entries, dry_run)


def pruned_json(pruned: Pruned) -> str:
    return as_json(
        {"dry_run": pruned.dry_run, "entries": pruned.n_entries, "keys": list(pruned.keys)}
    )


def print_pruned(pruned: Pruned) -> None:
    conversations = count(len(pruned.keys), "conversation")
    plain_console().print(
        f"Would forget {conversations}"
        if pruned.dry_run
        else f"Forgot {conversations} ({count_entries(pruned.n_entries)})"
    )


def _usage(tier: dict[str, Any]) -> str:
    if tier["name"] == SHARED:  # what others store there is not known here
        return f"{SHARED} {count_entries(tier['entries'])} known here"
    return f"{tier['name']} {decimal(tier['bytes'])} of {decimal(tier['budget_bytes'])}"


def _line(prefix: Prefix, now: float) -> list[str]:
    return [
        prefix["key"][:SHORT_KEY],
        prefix["name"] or "",
        str(prefix["tokens"]),
        decimal(prefix["bytes"]),
        ",".join(prefix["tiers"]),
        prefix["session"],
        prefix["class"],
        ago(now - prefix["last_used"]),
        str(prefix["hits"]),
        until(prefix["pinned_until"], now),
    ]
