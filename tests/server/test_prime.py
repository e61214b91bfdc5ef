"""`rekindle prime` with the embedded model: on a running server, and into a cache directory."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.server_process import ServerProcess, serve
from tests.support.workloads import SEARCH_TOOL, Client, prose, system, user

# Behind what the two prompts share: the empty user turn that is primed, and the reply's head.
BOUNDARY_TOKENS = 12


class Account(NamedTuple):
    n_tokens: int
    n_cached: int
    n_computed: int


@pytest.fixture(scope="module")
def server(embedded_model: Path) -> Iterator[ServerProcess]:
    with serve("--parallel", "1") as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with closing(Client(server.url)) as client:
        yield client


def rekindle_prime(*arguments: object, cache_dir: Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if "REKINDLE_" not in name}
    return subprocess.run(
        [sys.executable, "-m", "rekindle", "prime", *map(str, arguments)],
        env={**clean, "REKINDLE_CACHE_DIR": str(cache_dir)},
        capture_output=True,
        text=True,
    )


def primed(*arguments: object, cache_dir: Path) -> Account:
    done = rekindle_prime(*arguments, cache_dir=cache_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    [numbers] = re.findall(r": (\d+) tokens, (\d+) cached, (\d+) computed", done.stdout)
    return Account(*map(int, numbers))


def agent_file(folder: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """A file in the short form, and what an agent with the same prompt and tools asks."""
    prompt = system(name)
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"system": prompt["content"], "tools": [SEARCH_TOOL]}))
    return file, {"messages": [prompt, user(prose(name, 20))], "tools": [SEARCH_TOOL]}


def test_an_agent_finds_the_primed_prompt_and_priming_again_computes_nothing(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    file, question = agent_file(tmp_path, "planner")
    first = primed(file, "--url", server.url, cache_dir=tmp_path)
    assert first.n_computed == first.n_tokens - first.n_cached > 250
    again = primed(file, "--url", server.url, cache_dir=tmp_path)
    assert again.n_tokens == first.n_tokens
    assert again.n_computed <= 1
    answer = client.chat(**question)
    assert answer.n_cached >= first.n_tokens - BOUNDARY_TOKENS


def test_a_primed_recorded_request_is_found_completely(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    body = {
        "system": system("recorder")["content"],
        "messages": [user(prose("recorder", 30))],
        "max_tokens": 5,
    }
    file = tmp_path / "recorded.jsonl"
    file.write_text(json.dumps({"path": "/v1/messages?beta=true", "body": body}) + "\n")
    account = primed(file, "--url", server.url, cache_dir=tmp_path)
    usage = client.post("/v1/messages", body)["usage"]
    assert usage["cache_read_input_tokens"] == account.n_tokens - 1


def test_a_prompt_that_does_not_fit_is_an_error_with_its_file(
    server: ServerProcess, tmp_path: Path
) -> None:
    file = tmp_path / "long.txt"
    file.write_text("word " * 20_000)
    done = rekindle_prime(file, "--url", server.url, cache_dir=tmp_path)
    assert done.returncode == 1
    assert re.search(rf"{re.escape(str(file))}: .* The prompt has \d+ tokens", done.stdout)


def test_a_prompt_primed_without_a_server_is_found_by_the_next_server(
    embedded_model: Path, tmp_path: Path
) -> None:
    cache_dir = tmp_path / "cache"
    file, question = agent_file(tmp_path, "sleeper")
    account = primed(file, cache_dir=cache_dir)
    assert account.n_computed == account.n_tokens
    stored = [path.stat().st_size for path in cache_dir.rglob("*.kv")]
    assert stored
    assert all(stored)
    with (
        serve(environment={"REKINDLE_CACHE_DIR": str(cache_dir)}) as server,
        closing(Client(server.url)) as client,
    ):
        server.wait_for_log(" cache: ")  # what is on disk is known
        answer = client.chat(**question)
    assert answer.sources == {"disk"}
    assert answer.n_cached >= account.n_tokens - BOUNDARY_TOKENS
