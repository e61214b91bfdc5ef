"""However a server ends, its engine processes end with it."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from tests.conftest import TinyModels
from tests.support.engine_processes import (
    MARK,
    deaths_by_cause,
    engines_of,
    marked,
    state_of,
    stop,
    wait_for,
)
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture, write_tiny_model
from tests.support.wire_replies import COMPLETIONS
from tests.support.workloads import Client

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

END_SECONDS = 60.0  # for a stopped engine to be noticed and ended
ENDLESS = {"prompt": [5], "ignore_eos": True, "max_tokens": 10_000, "stream": True}
ENGINE = ("--ctx-size", "16384", "--parallel", "2", "--threads", "1", "--engine-hang", "10")


@contextmanager
def serving(*arguments: str, grace: float = 0.2) -> Iterator[tuple[ServerProcess, str]]:
    mark = str(uuid4())
    with serve(
        *arguments, *ENGINE, "--shutdown-grace", str(grace), environment={MARK: mark}
    ) as server:
        try:
            yield server, mark
        finally:
            for pid in marked(mark):  # a failed test leaves nothing behind
                if pid != server.process.pid:
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def server(tiny_models: TinyModels) -> Iterator[tuple[ServerProcess, str]]:
    with serving(str(tiny_models(TinyArchitecture.LLAMA))) as server_and_mark:
        yield server_and_mark


def engines_marked(mark: str) -> list[int]:
    """Engine processes, wherever they are in the tree by now."""
    return [pid for pid in marked(mark) if state_of(pid) != "Z"]


def has_engines(mark: str, n_engines: int) -> bool:
    return len(engines_marked(mark)) == n_engines


def ctrl_c(server: ServerProcess) -> None:
    os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does: to all of the group


def sigterm(server: ServerProcess) -> None:
    server.process.send_signal(signal.SIGTERM)


def sigterm_to_all(server: ServerProcess) -> None:
    os.killpg(server.process.pid, signal.SIGTERM)  # as systemd does


def kill_9(server: ServerProcess) -> None:
    server.process.kill()


@pytest.mark.parametrize("engine_is", ["busy", "stopped"])
@pytest.mark.parametrize("end", [ctrl_c, sigterm, sigterm_to_all, kill_9])
def test_no_engine_outlives_its_server(
    server: tuple[ServerProcess, str], end: Callable[[ServerProcess], None], engine_is: str
) -> None:
    process, mark = server
    [engine] = engines_of(process.process.pid)
    assert engine in engines_marked(mark)
    with httpx.stream("POST", f"{process.url}{COMPLETIONS}", json=ENDLESS, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        if engine_is == "stopped":
            stop(engine)
        end(process)
        code = process.process.wait(timeout=60)
    assert code == (-signal.SIGKILL if end is kill_9 else 0)
    wait_for(lambda: not engines_marked(mark), "no engine is left", seconds=END_SECONDS)


def test_a_server_that_drains_ends_its_engine_after_the_last_reply(
    tiny_models: TinyModels,
) -> None:
    body = {**ENDLESS, "max_tokens": 600}
    model = str(tiny_models(TinyArchitecture.LLAMA))
    with serving(model, grace=60) as (server, mark):
        with httpx.stream("POST", f"{server.url}{COMPLETIONS}", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            sigterm_to_all(server)
            assert "data: [DONE]" in list(lines)
        assert server.process.wait(timeout=60) == 0
        wait_for(lambda: not engines_marked(mark), "no engine is left", seconds=END_SECONDS)


def test_an_engine_leaves_signals_of_the_terminal_to_its_server(
    server: tuple[ServerProcess, str],
) -> None:
    process, _ = server
    [engine] = engines_of(process.process.pid)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(engine, number)
        body = {"prompt": [5, 6], "max_tokens": 4}
        httpx.post(f"{process.url}{COMPLETIONS}", json=body, timeout=60).raise_for_status()
    assert engines_of(process.process.pid) == [engine]
    assert not deaths_by_cause(process.url)


def test_each_loaded_model_has_one_engine_process_and_an_unloaded_one_has_none(
    tmp_path: Path,
) -> None:
    for name, seed in (("alpha", 1), ("beta", 2)):
        write_tiny_model(tmp_path / f"{name}.gguf", TinyArchitecture.LLAMA, seed=seed)
    with (
        serving("--models-dir", str(tmp_path)) as (server, mark),
        closing(Client(server.url)) as client,
    ):
        assert not engines_marked(mark)
        for _ in range(2):
            for n_loaded, name in enumerate(("alpha", "beta"), 1):
                client.post(f"/v1/models/{name}/load", {})
                assert len(engines_of(server.process.pid)) == n_loaded
            for n_left, name in ((1, "alpha"), (0, "beta")):
                client.post(f"/v1/models/{name}/unload", {})
                wait_for(partial(has_engines, mark, n_left), "the end of its engine")
        client.post("/v1/models/alpha/load", {})
        [engine] = engines_of(server.process.pid)
        os.kill(engine, signal.SIGKILL)
        assert client.complete([5, 6], model="alpha").n_prefilled == 2
        kill_9(server)
        wait_for(lambda: not engines_marked(mark), "no engine is left", seconds=END_SECONDS)


def test_names_pins_and_sessions_survive_a_death_of_the_engine(
    server: tuple[ServerProcess, str],
) -> None:
    process, _ = server
    pid = process.process.pid
    url = process.url
    chat = f"{url}/v1/chat/completions"
    rules = {"role": "user", "content": "Keep to the rules of the house. " * 60}
    body = {"messages": [rules], "max_tokens": 1, "prompt_cache_key": "mine"}
    named = {**body, "max_tokens": 0, "cache_key": "the-rules", "persist": True}
    primed = httpx.post(chat, json=named, timeout=60)
    assert primed.status_code == 200, primed.text
    [stored] = [each for each in httpx.get(f"{url}/v1/cache").json()["data"] if each["name"]]
    pin = httpx.post(f"{url}/v1/cache/{stored['key']}/pin", json={"seconds": 3600}, timeout=60)
    assert pin.status_code == 200
    sessions = httpx.get(f"{url}/v1/sessions").json()["data"]

    [engine] = engines_of(pid)
    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: engines_of(pid) not in ([], [engine]), "the engine is started again")
    [again] = [
        each for each in httpx.get(f"{url}/v1/cache", timeout=60).json()["data"] if each["name"]
    ]
    assert (again["name"], again["key"]) == ("the-rules", stored["key"])
    assert again["pinned_until"] is not None
    assert httpx.get(f"{url}/v1/sessions").json()["data"] == sessions
    usage = httpx.post(chat, json=body, timeout=60).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_a_model_file_that_was_replaced_is_not_loaded_by_a_restart(tmp_path: Path) -> None:
    """Its rows would be mixed up with those of the file that the server has loaded."""
    model = write_tiny_model(tmp_path / "model.gguf", TinyArchitecture.LLAMA)
    other = write_tiny_model(tmp_path / "other.gguf", TinyArchitecture.LLAMA, seed=2)
    with serving(str(model)) as (server, _):
        pid = server.process.pid
        other.replace(model)
        os.kill(engines_of(pid)[0], signal.SIGKILL)
        answer = httpx.post(
            f"{server.url}{COMPLETIONS}", json={"prompt": "a", "max_tokens": 1}, timeout=120
        )
        assert answer.status_code == 503
        assert "has changed" in answer.json()["error"]["message"]
        assert httpx.get(f"{server.url}/health").status_code == 503
