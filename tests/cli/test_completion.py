"""Shell completion, and examples in every help text of ours."""

import os
import shlex
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rekindle.cache.names import Named
from rekindle.cli import app
from tests.cache.entries import MODEL, open_tier
from tests.support.cache_command import hex_of, store_conversations


def complete(line: str, shell: str) -> list[str]:
    """As the script asks that `rekindle --install-completion` puts in place."""
    words = line.split(" ")
    variables = {
        "_REKINDLE_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        [sys.executable, "-c", "from rekindle.cli import main; main()"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_and_flags_are_completed(shell: str) -> None:
    assert any("cache" in word for word in complete("rekindle ca", shell))
    offered = " ".join(complete("rekindle cache ", shell))
    assert all(command in offered for command in ("export", "import", "prune", "ls"))
    assert any("--once" in word for word in complete("rekindle top --o", shell))


def test_keys_and_names_of_the_directory_are_completed(tmp_path: Path) -> None:
    stored = store_conversations(tmp_path / "cache")
    named = Named(root=MODEL, name="docs", tokens=b"\0\0\0\1", session="s", named_at=0.0)
    with closing(open_tier(stored.directory)) as tier:
        tier.give_name(named)
    [key] = hex_of(stored.third)
    where = f"--dir {stored.directory}"
    assert complete(f"rekindle cache show {where} {key[:6]}", "bash") == [key]
    assert complete(f"rekindle cache export {where} do", "bash") == ["docs"]
    assert complete(f"rekindle cache show --dir {tmp_path} do", "bash") == []


def test_completion_installs_itself_into_bash(tmp_path: Path) -> None:
    rekindle = f"{shlex.quote(sys.executable)} -c 'from rekindle.cli import main; main()'"
    # Two commands, so that bash stays the parent: that is how the shell is told.
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{rekindle} --install-completion; echo $?"],
        env={**os.environ, "HOME": str(tmp_path), "SHELL": "/bin/bash"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "0", done.stdout + done.stderr
    [line] = [each for each in (tmp_path / ".bashrc").read_text().splitlines() if each]
    known = subprocess.run(
        ["bash", "--norc", "-c", f"{line}; complete -p rekindle"],
        capture_output=True,
        text=True,
    )
    assert known.stdout.rstrip().endswith(" rekindle"), known.stderr


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["top"],
        ["launch"],
        ["cache"],
        *(["cache", name] for name in ("ls", "show", "verify", "prune", "clear")),
        *(["cache", name] for name in ("export", "import")),
    ],
)
def test_help_teaches_with_examples(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"}).stdout
    lines = [line.strip() for line in shown.splitlines()]
    examples = lines[lines.index("Examples:") + 1 :]
    examples = examples[: examples.index("")]
    assert 2 <= len(examples) <= 3
    assert all(line.startswith(" ".join(["rekindle", *command])) for line in examples)
