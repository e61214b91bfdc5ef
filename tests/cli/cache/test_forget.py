"""`rekindle cache forget` on a directory."""

from contextlib import closing
from pathlib import Path

import pytest

from rekindle.cache.forgetting.tombstone_file import TombstoneFile
from rekindle.cache.turns.database import TurnDatabase
from rekindle.generation.forgetting import Owner, Scope, Tombstones
from tests.cache.entries import MODEL
from tests.cache.turns.writer import make_turn
from tests.support.cache_command import Stored, cache, store_conversations


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    made = store_conversations(tmp_path / "cache")
    with closing(TurnDatabase(made.directory, fingerprint=MODEL, forgotten=Tombstones())) as turns:
        for number, session in enumerate(("ann", "bob")):
            owner = Owner(namespace="", session=session, asked_at=1.0)
            turns.keep(make_turn(number, owner=owner))
    return made


def scopes(directory: Path) -> list[Scope]:
    return [each.scope for each in TombstoneFile(directory).all()]


def test_forget_all_deletes_entries_and_turns_and_leaves_a_tombstone(stored: Stored) -> None:
    done = cache("forget", "--all", "--yes", "--json", directory=stored.directory)
    assert done.code == 0, done.output
    assert done.json["unreached"] == []
    assert (done.json["places"]["disk"], done.json["places"]["turns"]) == (4, 2)
    assert scopes(stored.directory) == [Scope()]
    assert cache("ls", "--json", directory=stored.directory).json == []
    again = cache("forget", "--all", "--yes", directory=stored.directory)
    assert again.code == 0
    assert again.output.splitlines() == [
        "There was nothing to delete",
        "A running server follows within seconds.",
    ]


def test_forget_a_session_leaves_the_others(stored: Stored) -> None:
    done = cache("forget", "--session", "ann", "--yes", directory=stored.directory)
    assert done.code == 0, done.output
    assert "1 in turns" in done.output
    assert scopes(stored.directory) == [Scope(namespace="", session="ann")]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "forget requires --session NAME, --namespace ID or --all."),
        (["--all", "--session", "a"], "leave --session and --namespace out"),
        (["--session", ""], "--session must not be empty"),
        (["--namespace", "x", "--url", "http://127.0.0.1:1"], "leave --namespace out"),
        (["--all"], "There is no terminal to ask for confirmation. Add --yes"),
    ],
)
def test_forget_refuses_an_unclear_scope_and_asks_first(
    stored: Stored, flags: list[str], complaint: str
) -> None:
    done = cache("forget", *flags, directory=stored.directory)
    assert done.code == 2
    assert complaint in done.output
    assert scopes(stored.directory) == []
