"""A prompt that one server computed is found by another, after an export and an import."""

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.conftest import TinyModels
from tests.support.server_process import serve
from tests.support.tiny_models import TinyArchitecture
from tests.support.workloads import Client

PROMPT = "The harbour was quiet, and the lamps along the quay went out one by one. " * 30


def rekindle(*arguments: object) -> "subprocess.CompletedProcess[str]":
    clean = {name: value for name, value in os.environ.items() if "REKINDLE_" not in name}
    return subprocess.run(
        [sys.executable, "-m", "rekindle", *map(str, arguments)],
        env=clean,
        capture_output=True,
        text=True,
    )


def answer_json(*arguments: object) -> dict[str, object]:
    done = rekindle(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    told: dict[str, object] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(TinyArchitecture.LLAMA, marks=pytest.mark.long), TinyArchitecture.QWEN35],
)
def test_an_exported_prompt_is_found_on_disk_in_another_directory(
    architecture: TinyArchitecture, tiny_models: TinyModels, tmp_path: Path
) -> None:
    model = str(tiny_models(architecture))
    here, there, pack = tmp_path / "here", tmp_path / "there", tmp_path / "prompt.rk"
    with (
        serve(model, environment={"REKINDLE_CACHE_DIR": str(here)}) as server,
        closing(Client(server.url)) as client,
    ):
        tokens = client.tokenize(PROMPT)
        client.complete(tokens)
        client.wait_until_on_disk()
        assert server.stop() == 0
    listed = json.loads(rekindle("cache", "ls", "--json", "--dir", here).stdout)
    longest = max(listed, key=lambda entry: entry["stop"])
    exported = answer_json("cache", "export", longest["key"], "-o", pack, "--dir", here)
    with serve(model, environment={"REKINDLE_CACHE_DIR": str(there)}) as server:
        # Beside a server that has the directory open already.
        imported = answer_json("cache", "import", pack, "--url", server.url)
        assert imported["added"] == exported["keys"]
        assert rekindle("cache", "verify", "--url", server.url).returncode == 0
        assert server.stop() == 0
    with (
        serve(model, environment={"REKINDLE_CACHE_DIR": str(there)}) as server,
        closing(Client(server.url)) as client,
    ):
        server.wait_for_log(" cache: ")  # what is on disk is known
        answer = client.complete(tokens)
    assert answer.sources == {"disk"}
    assert answer.n_prefilled <= 1 + len(tokens) % 256
    assert rekindle("cache", "verify", "--dir", there).returncode == 0


def test_top_shows_a_server_at_work(tiny_models: TinyModels) -> None:
    model = tiny_models(TinyArchitecture.LLAMA)
    with serve(str(model), "--parallel", "2") as server, closing(Client(server.url)) as client:
        tokens = client.tokenize(PROMPT)
        client.complete(tokens)
        client.complete(tokens)
        told = answer_json("top", "--url", server.url)
        shown = rekindle("top", "--once", "--url", server.url)
    assert shown.returncode == 0, shown.stderr
    assert "slots 0/2" in shown.stdout
    assert re.search(r"from the context +[1-9]", shown.stdout)
    assert "\x1b" not in shown.stdout
    counted = told["tokens"]
    assert isinstance(counted, dict)
    assert counted["live"] + counted["prefilled"] == 2 * len(tokens)


def test_a_name_given_over_http_is_listed_and_travels(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    model = str(tiny_models(TinyArchitecture.LLAMA))
    here, there, pack = tmp_path / "here", tmp_path / "there", tmp_path / "prompt.rk"
    with (
        serve(model, environment={"REKINDLE_CACHE_DIR": str(here)}) as server,
        closing(Client(server.url)) as client,
    ):
        client.complete(client.tokenize(PROMPT), cache_key="docs/v1")
        client.wait_until_on_disk()
        shown = answer_json("cache", "show", "docs/v1", "--url", server.url)
        assert shown["name"] == "docs/v1"
        assert server.stop() == 0
    exported = answer_json("cache", "export", "docs/v1", "-o", pack, "--dir", here)
    assert exported["names"] == ["docs/v1"]
    assert answer_json("cache", "import", pack, "--dir", there)["names_added"] == ["docs/v1"]
    with serve(model, environment={"REKINDLE_CACHE_DIR": str(there)}) as server:
        shown = answer_json("cache", "show", "docs/v1", "--url", server.url)
        assert shown["tiers"] == ["disk"]
        pruned = answer_json("cache", "prune", "--older-than", "0s", "--url", server.url)
        assert pruned["dry_run"] is False
        assert "docs/v1" in rekindle("cache", "ls", "--url", server.url).stdout
