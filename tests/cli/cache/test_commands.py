"""`rekindle cache`: `ls`, `show` and `prune`, and the directory they use."""

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rekindle.cache.entry import BLOCK_TOKENS
from rekindle.cache.fingerprint import default_cache_dir
from tests.cache.entries import MODEL, file_of
from tests.support.cache_command import (
    COMMANDS,
    Done,
    Stored,
    cache,
    everything_in,
    hex_of,
    kept,
)


def test_no_command_loads_llama_cpp_or_a_web_framework(stored: Stored) -> None:
    script = (
        "import sys\n"
        "from rekindle.cli import app\n"
        f"for command in {COMMANDS!r}:\n"
        f"    where = ['--dir', {str(stored.directory)!r}]\n"
        "    try:\n"
        "        app(['cache', *command, *where], standalone_mode=False)\n"
        "    except Exception as error:\n"
        "        print(error, file=sys.stderr)\n"
        "heavy = {'llama_cpp', 'fastapi', 'uvicorn', 'httpx', 'rekindle.server'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert "starts with 'a'" in done.stderr  # all but `show` did their work
    assert len(done.stderr.splitlines()) == 1


def test_ls_has_a_line_for_each_conversation_newest_first(stored: Stored) -> None:
    done = cache("ls", "--json", directory=stored.directory)
    assert done.keys == hex_of(stored.third, stored.second, stored.first)
    assert [entry["stop"] for entry in done.json] == [30, BLOCK_TOKENS + 20, BLOCK_TOKENS + 10]
    lone, second, _ = done.json
    assert lone["chain_bytes"] == lone["bytes"]
    shared = cache("show", *hex_of(stored.shared), "--json", directory=stored.directory).json
    assert second["chain_bytes"] == second["bytes"] + shared["bytes"]
    assert second["fingerprint"] == MODEL.hex()
    assert (second["reason"], second["uses"]) == ("turn_end", 1)


def test_ls_all_has_a_line_for_each_entry(stored: Stored) -> None:
    done = cache("ls", "--all", "--json", directory=stored.directory)
    assert done.keys == hex_of(stored.third, stored.second, stored.first, stored.shared)


def test_ls_in_a_pipe_is_a_plain_table_with_totals(stored: Stored) -> None:
    lines = cache("ls", directory=stored.directory).output.splitlines()
    assert lines[0].split()[:4] == ["key", "tokens", "size", "chain"]
    assert lines[1].split()[:2] == [stored.third.header.key.hex()[:12], "30"]
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[4].startswith("3 conversations, 4 entries, 316 tokens, ")
    assert all(line.isascii() for line in lines)


def test_show_tells_what_an_entry_follows_and_its_token_ids(stored: Stored) -> None:
    prefix = stored.first.header.key.hex()[:12].upper()
    shown = cache("show", prefix, "--json", directory=stored.directory).json
    assert shown["key"] == stored.first.header.key.hex()
    assert shown["parents"] == hex_of(stored.shared)
    assert shown["path"] == str(file_of(stored.directory, stored.first.header.key))
    ids = shown["token_ids"]
    assert len(ids) == 10
    text = cache("show", stored.shared.header.key.hex(), directory=stored.directory).output
    assert "..." in text
    assert cache("show", prefix, directory=stored.directory).output.count(" ".join(map(str, ids)))


def test_show_names_the_candidates_when_a_key_is_ambiguous(stored: Stored) -> None:
    done = cache("show", "", directory=stored.directory)
    assert done.code == 2
    assert "4 keys" in done.output
    assert all(key in done.output for key in hex_of(stored.shared, stored.third))


def test_show_of_an_unknown_key_is_one_sentence(stored: Stored) -> None:
    done = cache("show", "xyz", directory=stored.directory)
    assert done == Done(2, f"No entry in {stored.directory} has a key that starts with 'xyz'.")


def test_prune_drops_what_was_not_used_for_longest_and_keeps_parents(stored: Stored) -> None:
    listed = cache("ls", "--all", "--json", directory=stored.directory).json
    total = sum(entry["bytes"] for entry in listed)
    done = cache("prune", "--to", f"{total - 1}B", "--json", directory=stored.directory)
    assert done.json["keys"] == hex_of(stored.first)
    assert kept(stored.directory) == set(hex_of(stored.shared, stored.second, stored.third))
    assert done.json["bytes_left"] == total - done.json["bytes"]


def test_prune_by_age_and_by_size_adds_up(stored: Stored) -> None:
    arguments = ("--older-than", f"{997 * 60 + 30}m")  # so are the first one and the shared start
    done = cache("prune", *arguments, "--json", directory=stored.directory)
    assert done.json["keys"] == hex_of(stored.first)
    done = cache("prune", *arguments, "--to", "0", "--json", directory=stored.directory)
    assert done.json["keys"] == hex_of(stored.second, stored.shared, stored.third)
    assert kept(stored.directory) == set()


def test_prune_dry_run_says_the_same_and_changes_nothing(stored: Stored) -> None:
    before = everything_in(stored.directory)
    would = cache("prune", "--to", "50KB", "--dry-run", "--json", directory=stored.directory)
    assert everything_in(stored.directory) == before
    did = cache("prune", "--to", "50KB", "--json", directory=stored.directory)
    assert did.json == {**would.json, "dry_run": False}
    assert did.json["entries"] > 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "prune requires --to SIZE or --older-than AGE."),
        (["--to", "much"], "--to must be a size such as 500MB, 20GiB or 0, but is 'much'."),
        (["--to", "20"], "--to must be a size such as 500MB, 20GiB or 0, but is '20'."),
        (["--older-than", "7"], "--older-than must be an age such as 12h or 7d, but is '7'."),
    ],
)
def test_prune_refuses_what_it_cannot_read(
    stored: Stored, arguments: list[str], complaint: str
) -> None:
    assert cache("prune", *arguments, directory=stored.directory) == Done(2, complaint)
    assert len(kept(stored.directory)) == 4


def foreign_database(path: Path) -> None:
    path.mkdir()
    with closing(sqlite3.connect(path / "catalog.sqlite3")) as connection:
        connection.execute("CREATE TABLE books (title)")


def folder_of_entries(path: Path) -> None:
    (path / "entries" / "ab").mkdir(parents=True)
    (path / "entries" / "ab" / "notes.kv").write_text("x")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda path: None, "cannot be read: No such file or directory."),
        (lambda path: path.write_text("x"), "cannot be read: Not a directory."),
        (lambda path: path.mkdir(), "is not a cache of Rekindle"),
        (foreign_database, "is not a cache of Rekindle"),
        (folder_of_entries, "is not a cache of Rekindle"),
    ],
)
def test_what_is_no_cache_is_told_in_a_sentence_and_left_alone(
    tmp_path: Path, make: Callable[[Path], object], complaint: str, command: list[str]
) -> None:
    path = tmp_path / "cache"
    make(path)
    before = everything_in(tmp_path)
    done = cache(*command, directory=path)
    assert done.code == 2
    assert complaint in done.output
    assert str(path) in done.output
    assert everything_in(tmp_path) == before


def test_a_bad_directory_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    foreign_database(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-m", "rekindle", "cache", "ls", "--dir", str(tmp_path / "cache")],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("rekindle: The directory ")


def test_the_directory_is_the_one_the_server_would_use(stored: Stored, tmp_path: Path) -> None:
    config = tmp_path / "rekindle.toml"
    config.write_text(f'[cache]\ncache_dir = "{stored.directory}"\n')
    elsewhere = {"REKINDLE_CACHE_DIR": str(tmp_path / "elsewhere")}
    here = {"REKINDLE_CACHE_DIR": str(stored.directory)}
    assert cache("ls", directory=None, **here).code == 0
    assert cache("ls", directory=None, REKINDLE_CONFIG=str(config)).code == 0
    assert cache("ls", directory=None, REKINDLE_CONFIG=str(config), **elsewhere).code == 2
    assert cache("ls", directory=stored.directory, **elsewhere).code == 0
    default = cache("ls", directory=None, XDG_CACHE_HOME=str(tmp_path))
    assert default_cache_dir().parts[-2:] == ("rekindle", "prefixes")
    assert "prefixes" in default.output
