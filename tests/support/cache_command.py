"""`rekindle cache` as tests call it, and a cache directory that a real disk tier wrote."""

import json
import os
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from rekindle.cache.entry import BLOCK_TOKENS, Entry, Reason
from rekindle.cli import app
from rekindle.errors import StartupError
from tests.cache.entries import assert_catalogue_is_true, make_entry, open_tier

COMMANDS = (["ls"], ["show", "a"], ["verify"], ["prune", "--to", "0"], ["clear", "--yes"])


@dataclass(frozen=True)
class Done:
    code: int
    output: str

    @property
    def json(self) -> Any:
        return json.loads(self.output)

    @property
    def keys(self) -> list[str]:
        return [entry["key"] for entry in self.json]


def cache(command: str, *arguments: str, directory: Path | None, **variables: str) -> Done:
    where = [] if directory is None else ["--dir", str(directory)]
    cleared = {name: None for name in os.environ if name.startswith("REKINDLE_")}
    done = CliRunner().invoke(
        app, ["cache", command, *where, *arguments], env={**cleared, **variables}
    )
    if isinstance(done.exception, StartupError):
        return Done(2, done.exception.message)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Done(done.exit_code, done.stdout)


@dataclass(frozen=True)
class Stored:
    """Two conversations with a common start, and one by itself."""

    directory: Path
    shared: Entry
    first: Entry
    second: Entry
    third: Entry


def store_conversations(directory: Path) -> Stored:
    """Their entries are stored an hour apart, the first one 999 hours ago."""
    age_hours = 1000
    tier = open_tier(directory, now=lambda: time.time() - 3600 * age_hours)

    def put(seed: int, *, n_tokens: int, parent: Entry | None = None) -> Entry:
        nonlocal age_hours
        age_hours -= 1
        made = make_entry(seed, parent=parent.header.key if parent else None, n_tokens=n_tokens)
        start = parent.header.stop if parent else 0
        entry = replace(made, header=replace(made.header, start=start, reason=Reason.TURN_END))
        tier.put(entry)
        return entry

    with closing(tier):
        shared = put(1, n_tokens=BLOCK_TOKENS)
        return Stored(
            directory,
            shared=shared,
            first=put(2, n_tokens=10, parent=shared),
            second=put(3, n_tokens=20, parent=shared),
            third=put(4, n_tokens=30),
        )


def hex_of(*entries: Entry) -> list[str]:
    return [entry.header.key.hex() for entry in entries]


def kept(directory: Path) -> set[str]:
    assert_catalogue_is_true(directory)
    return {path.stem for path in directory.glob("entries/*/*.kv")}


def everything_in(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in directory.rglob("*")
    }
