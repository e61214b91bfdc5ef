"""Every sh and python block of the README and the guides runs, or says why it cannot.

The blocks run from top to bottom, each page in a folder of its own, with a new home, against a
server on the embedded model. A line that starts a server runs with `--print-config`: its flags
and values are checked, and no second model is loaded.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from platformdirs import user_cache_path

from tests.support.needs import program
from tests.support.server_process import ServerProcess, serve

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
DOCUMENTED_URL = "http://127.0.0.1:8080"
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = ("sh", "python")
REASON = re.compile(r" no-test: \w.{8,}")
# What a page says that its blocks print.
PRINTED = {
    "README.md": ("PromptTokensDetails(", '"reason":"system_changed"'),
    "docs/guides/models.md": ("983.04 MB",),
    "docs/guides/slow.md": ('"reason":"system_changed"', "hit share"),
}
BLOCK_SECONDS = 120  # a machine under load; nothing is measured here

# In place of the installed command: a server that a page starts only checks its flags.
COMMAND = """#!/bin/sh
case "$1" in
  serve) exec "{python}" -m rekindle "$@" --print-config ;;
  *) exec "{python}" -m rekindle "$@" ;;
esac
"""


class Block(NamedTuple):
    language: str
    info: str  # what follows the language on the first line
    code: str


def blocks_of(page: Path) -> list[Block]:
    found = (Block(*match) for match in FENCE.findall(page.read_text("utf-8")))
    return [block for block in found if block.language in LANGUAGES]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new user's home, where the embedded model was converted before."""
    folder = tmp_path_factory.mktemp("home")
    (folder / ".cache" / "rekindle").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def environment(home: Path, embedded_model: Path) -> dict[str, str]:
    (home / ".cache" / "rekindle" / "models").symlink_to(embedded_model.parent)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("REKINDLE_", "LLAMA_", "XDG_"))
    }
    folder = home / "bin"
    folder.mkdir()
    command = folder / "rekindle"
    command.write_text(COMMAND.format(python=sys.executable), "utf-8")
    command.chmod(0o755)
    path = os.pathsep.join((str(folder), kept["PATH"]))
    return {**kept, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "PATH": path}


@pytest.fixture(scope="module")
def server(environment: dict[str, str], home: Path) -> Iterator[ServerProcess]:
    program("curl")
    cache = {"REKINDLE_CACHE_DIR": str(home / ".cache" / "rekindle" / "prefixes")}
    with serve(environment={**environment, **cache}) as running:
        yield running


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_block_runs_or_says_why_not(
    page: Path, server: ServerProcess, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(environment["HOME"]) / "bin")
    printed = ""
    for block in blocks_of(page):
        if block.info:
            assert REASON.fullmatch(block.info), f"{block.info!r} is no reason"
            continue
        code = block.code.replace(DOCUMENTED_URL, server.url)
        port = {"REKINDLE_PORT": server.url.rpartition(":")[2]}  # of commands without --url
        shell = ["bash", "-euo", "pipefail", "-c"]
        command = [sys.executable, "-c"] if block.language == "python" else shell
        ended = subprocess.run(
            [*command, code],
            cwd=tmp_path,
            env={**environment, **port},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BLOCK_SECONDS,
            check=False,
        )
        said = f"{ended.stdout}\n{ended.stderr}"
        assert ended.returncode == 0, f"{code}\n{said}"
        assert '{"error"' not in ended.stdout, f"{code}\n{said}"
        printed += ended.stdout
    for text in PRINTED.get(page.relative_to(ROOT).as_posix(), ()):
        assert text in printed


def test_the_pages_have_blocks_that_run() -> None:
    # The blocks about agents start them; tests/launch compares these with what `launch` prints.
    pages = [page for page in PAGES if page.stem != "agents"]
    blocks = [block for page in pages for block in blocks_of(page)]
    assert sum(not block.info for block in blocks) > len(blocks) / 2
    assert {block.language for block in blocks if not block.info} == set(LANGUAGES)


def test_the_home_of_the_blocks_is_not_the_users(environment: dict[str, str]) -> None:
    assert not user_cache_path().is_relative_to(environment["HOME"])
