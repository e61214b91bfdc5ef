"""`rekindle cache --url`: lists and prunes what a running server has stored."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from rekindle.cli.plain import (
    SHORT_KEY,
    ago,
    count,
    count_entries,
    filled_table,
    plain_console,
    print_json,
    print_pairs,
    until,
)
from rekindle.cli.remote import Remote, connected, exit_1_on_error
from rekindle.cli.top.snapshot import SHARED
from rekindle.errors import StartupError

_MOST_LISTED = 1000  # the server's own maximum
_MOST_NAMED = 8
_NUMBERS = {"tokens", "size", "uses"}
_OPTIONAL = {"name", "pinned"}

Prefix = dict[str, Any]  # an element of `data` in the reply to GET /v1/cache


def stored_at(remote: Remote) -> dict[str, Any]:
    reply = remote.get("/v1/cache", limit=_MOST_LISTED)
    if not isinstance(reply, dict) or not isinstance(reply.get("data"), list):
        raise remote.stranger()
    return reply


def list_at(url: str, api_key: str | None, *, as_json: bool) -> None:
    with exit_1_on_error(), connected(url, api_key) as remote:
        reply = stored_at(remote)
    if as_json:
        print_json(reply)
        return
    now = time.time()
    rows = [_line(prefix, now) for prefix in reply["data"]]
    console = plain_console()
    if rows:
        console.print(filled_table(rows, numbers=_NUMBERS, optional=_OPTIONAL))
    console.print("; ".join([count(len(rows), "prompt"), *map(_usage, reply["usage"])]))


def show_at(url: str, api_key: str | None, key: str, *, as_json: bool) -> None:
    with exit_1_on_error(), connected(url, api_key) as remote:
        prefix = one_stored(remote, key)
    if as_json:
        print_json(prefix)
        return
    now = time.time()
    print_pairs(
        {
            "key": prefix["key"] or "not stored any more",
            "name": prefix["name"] or "none",
            "session": prefix["session"],
            "class": prefix["class"],
            "pinned": until(prefix["pinned_until"], now) or "no",
            "tokens": str(prefix["tokens"]),
            "size": f"{decimal(prefix['bytes'])}, with all entries before it",
            "tiers": ", ".join(prefix["tiers"]) or "no tier has all of it",
            "last used": ago(now - prefix["last_used"]),
            "uses": str(prefix["hits"]),
        }
    )


def one_stored(remote: Remote, key: str) -> Prefix:
    """Return the prefix with the name `key`, or with a key that starts with `key`."""
    prefixes: list[Prefix] = stored_at(remote)["data"]
    found = [each for each in prefixes if each["name"] == key] or [
        each for each in prefixes if each["key"] and each["key"].startswith(key.lower())
    ]
    if len({each["key"] for each in found}) == 1:
        return found[0]
    if not found:
        raise StartupError(
            f"Nothing at {remote.url} has the name {key!r} or a key that starts with it."
        )
    some = ", ".join(each["key"] for each in found[:_MOST_NAMED])
    raise StartupError(f"{len(found)} keys start with {key!r}, such as {some}. Give more digits.")


def to_prune(prefixes: Sequence[Prefix], used_before: float, *, now: float) -> list[Prefix]:
    """Return conversations unused since `used_before`, without named and pinned ones."""
    named = {each["key"] for each in prefixes if each["name"] is not None}
    return [
        each
        for each in prefixes
        if each["key"]
        and each["key"] not in named
        and each["last_used"] < used_before
        and (each["pinned_until"] or 0) <= now
    ]


def prune_at(
    url: str, api_key: str | None, *, unused_seconds: float, dry_run: bool, as_json: bool
) -> None:
    now = time.time()
    n_entries = 0
    with exit_1_on_error(), connected(url, api_key) as remote:
        stored = stored_at(remote)["data"]
        keys = [each["key"] for each in to_prune(stored, now - unused_seconds, now=now)]
        for key in () if dry_run else keys:
            deleted = remote.call_if_there("DELETE", f"/v1/cache/{key}")
            n_entries += deleted["deleted"] if deleted is not None else 0
    conversations = count(len(keys), "conversation")
    if as_json:
        print_json({"dry_run": dry_run, "entries": n_entries, "keys": keys})
    elif dry_run:
        plain_console().print(f"Would forget {conversations}")
    else:
        plain_console().print(f"Forgot {conversations} ({count_entries(n_entries)})")


def directory_at(url: str, api_key: str | None) -> Path:
    """Return the cache directory that the server uses. Raises StartupError if it is elsewhere."""
    with exit_1_on_error(), connected(url, api_key) as remote:
        cache = remote.get("/props")["rekindle"]["cache"] or {"tiers": []}
        on_disk = [tier for tier in cache["tiers"] if tier["name"] == "disk"]
        places = [tier["directory"] for tier in on_disk if tier.get("directory")]
        if not places:
            raise StartupError(f"{remote.url} stores nothing on disk.")
        home = Path(places[0])
        if not home.is_dir():
            raise StartupError(
                f"{remote.url} has its cache in {home}, which is not on this machine."
            )
        return home


def _usage(tier: dict[str, Any]) -> str:
    if tier["name"] == SHARED:  # entries of other servers are not known here
        return f"{SHARED} {count_entries(tier['entries'])} known here"
    return f"{tier['name']} {decimal(tier['bytes'])} of {decimal(tier['budget_bytes'])}"


def _line(prefix: Prefix, now: float) -> dict[str, str]:
    return {
        "key": prefix["key"][:SHORT_KEY],
        "name": prefix["name"] or "",
        "tokens": str(prefix["tokens"]),
        "size": decimal(prefix["bytes"]),
        "tiers": ",".join(prefix["tiers"]),
        "session": prefix["session"],
        "class": prefix["class"],
        "last used": ago(now - prefix["last_used"]),
        "uses": str(prefix["hits"]),
        "pinned": until(prefix["pinned_until"], now),
    }
