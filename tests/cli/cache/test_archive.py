"""`rekindle cache export` and `import`, and names in `ls` and `show`."""

import os
import pty
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner, Result

from rekindle.cache.entry import Retention
from rekindle.cache.names import Named
from rekindle.cli import app
from rekindle.generation.request import Rank
from tests.cache.entries import MODEL, file_of, make_entry, open_tier
from tests.support.cache_command import Stored, cache, hex_of, kept

FAR = 4_000_000_000.0


def give_name(stored: Stored, name: str, *, root: bytes = MODEL) -> None:
    """To the second conversation."""
    tokens = stored.shared.header.tokens + stored.second.header.tokens
    named = Named(root=root, name=name, tokens=tokens, session="ann", named_at=5.0)
    with closing(open_tier(stored.directory)) as tier:
        tier.give_name(named)


def run(*arguments: object) -> Result:
    cleared = {name: None for name in os.environ if name.startswith("REKINDLE_")}
    return CliRunner().invoke(app, ["cache", *map(str, arguments)], env=cleared)


def refusal(*arguments: object) -> str:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("rekindle: ")
    return done.stderr.removeprefix("rekindle: ").removesuffix("\n")


def test_an_exported_key_and_what_it_follows_arrive(stored: Stored, tmp_path: Path) -> None:
    pack, target = tmp_path / "a.rekindle", tmp_path / "target"
    prefix = stored.first.header.key.hex()[:12].upper()
    done = cache("export", prefix, "-o", str(pack), "--json", directory=stored.directory).json
    assert done["keys"] == hex_of(stored.shared, stored.first)
    assert (done["tokens"], done["bytes"]) == (266, pack.stat().st_size)
    imported = cache("import", str(pack), "--json", directory=target).json
    assert imported["added"] == done["keys"]
    assert imported["new_model"] is True
    assert kept(target) == set(done["keys"])
    again = cache("import", str(pack), "--json", directory=target).json
    assert (again["added"], again["entries"]) == ([], 2)


def test_a_name_is_exported_and_arrives(stored: Stored, tmp_path: Path) -> None:
    give_name(stored, "docs/v1")
    pack, target = tmp_path / "a.rekindle", tmp_path / "target"
    told = cache("export", "docs/v1", "-o", str(pack), directory=stored.directory).output
    assert told.startswith(f"Wrote {pack}: 276 tokens, named docs/v1, 2 entries, ")
    told = cache("import", str(pack), directory=target).output
    assert told.splitlines()[0] == f"Added 2 entries of the model {MODEL.hex()[:8]} to {target}"
    assert "Named: docs/v1" in told
    assert told.splitlines()[-1] == "A running server finds them at its next start"
    shown = cache("show", "docs/v1", "--json", directory=target).json
    assert (shown["key"], shown["names"]) == (stored.second.header.key.hex(), ["docs/v1"])


def test_several_prompts_share_what_they_have_in_common(stored: Stored, tmp_path: Path) -> None:
    give_name(stored, "docs/v1")
    pack = tmp_path / "a.rekindle"
    wanted = ("docs/v1", *hex_of(stored.first, stored.third))
    done = cache("export", *wanted, "-o", str(pack), "--json", directory=stored.directory).json
    assert sorted(done["keys"]) == sorted(kept(stored.directory))


def test_what_cannot_be_exported_is_one_sentence_and_no_file(
    stored: Stored, tmp_path: Path
) -> None:
    where = ("--dir", stored.directory)
    out = ("-o", tmp_path / "a.rekindle")
    assert "has a key that starts with 'xyz'" in refusal("export", "xyz", *out, *where)
    assert "4 keys start with" in refusal("export", "", *out, *where)
    give_name(stored, "twice")
    give_name(stored, "twice", root=b"n" * 16)
    assert "2 namespaces in " in refusal("export", "twice", *out, *where)
    nowhere = ("-o", tmp_path / "no" / "a.rekindle")
    key = stored.third.header.key.hex()
    assert "cannot be written: No such file or directory." in refusal(
        "export", key, *nowhere, *where
    )
    file_of(stored.directory, stored.shared.header.key).unlink()
    first = stored.first.header.key.hex()
    assert "was deleted while it was exported" in refusal("export", first, *out, *where)
    cache("verify", "--fix", directory=stored.directory)
    assert "is incomplete" in refusal("export", first, *out, *where)
    assert not (tmp_path / "a.rekindle").exists()


def test_what_cannot_be_imported_is_one_sentence(stored: Stored, tmp_path: Path) -> None:
    pack = tmp_path / "a.rekindle"
    pack.write_bytes(b"RKNDPACK" + bytes(100))
    told = refusal("import", pack, "--dir", stored.directory)
    assert told == (
        f"The file {pack} is refused (nothing was added): its format is 0, this version reads 1."
    )
    assert len(kept(stored.directory)) == 4


def test_neither_loads_llama_cpp_or_a_web_framework(stored: Stored, tmp_path: Path) -> None:
    pack = str(tmp_path / "a.rekindle")
    commands = [
        ["export", *hex_of(stored.first), "-o", pack, "--dir", str(stored.directory)],
        ["import", pack, "--dir", str(tmp_path / "target")],
    ]
    script = (
        "import sys\n"
        "from rekindle.cli import app\n"
        f"for command in {commands!r}:\n"
        "    app(['cache', *command], standalone_mode=False)\n"
        "heavy = {'llama_cpp', 'fastapi', 'uvicorn', 'httpx', 'rekindle.server'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_ls_and_show_tell_name_session_class_and_pin(stored: Stored) -> None:
    give_name(stored, "docs/v1")
    made = make_entry(80, n_tokens=40)
    retention = Retention(Rank.EPHEMERAL, "ann", FAR)
    with closing(open_tier(stored.directory)) as tier:
        tier.put(replace(made, retention=retention))
    listed = cache("ls", "--json", directory=stored.directory).json
    by_key = {entry["key"]: entry for entry in listed}
    second, pinned = (by_key[key] for key in hex_of(stored.second, made))
    assert (second["names"], second["session"]) == (["docs/v1"], "default")
    assert (second["class"], second["pinned_until"]) == ("main", None)
    assert (pinned["session"], pinned["class"], pinned["pinned_until"]) == ("ann", "ephemeral", FAR)
    lines = cache("ls", directory=stored.directory).output.splitlines()
    assert lines[0].split()[4:8] == ["name", "session", "class", "pinned"]
    text = cache("show", *hex_of(made), directory=stored.directory).output
    assert "ephemeral" in text
    assert "for " in text


def test_ls_has_a_line_for_a_prompt_with_a_name_that_others_go_on_from(stored: Stored) -> None:
    tokens = stored.shared.header.tokens
    named = Named(root=MODEL, name="start", tokens=tokens, session="ann", named_at=5.0)
    with closing(open_tier(stored.directory)) as tier:
        tier.give_name(named)
        tier.give_name(replace(named, name="lost", tokens=b"\1\1\1\1"))
    listed = cache("ls", "--json", directory=stored.directory)
    assert stored.shared.header.key.hex() in listed.keys
    told = cache("ls", directory=stored.directory).output
    assert "1 name of prompts that are not stored any more" in told


def test_both_show_how_far_they_are_on_a_terminal(stored: Stored, tmp_path: Path) -> None:
    pack = tmp_path / "a.rekindle"
    arguments = ["export", *hex_of(stored.first), "-o", str(pack), "--dir", str(stored.directory)]
    assert b"Reading entries" in on_a_terminal(arguments)
    assert b"Importing entries" in on_a_terminal(
        ["import", str(pack), "--dir", str(tmp_path / "target")]
    )


def on_a_terminal(arguments: list[str]) -> bytes:
    """What is drawn on stderr."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "rekindle", "cache", *arguments],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    process.communicate(timeout=60)
    assert process.returncode == 0
    drawn = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # its other end is closed
            break
        if not data:
            break
        drawn += data
    os.close(ours)
    return drawn
