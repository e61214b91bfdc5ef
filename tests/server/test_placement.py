"""Adapters, RoPE settings and `--fit` on a real server, and its stored prefixes across restarts."""

import os
import random
import re
import signal
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.conftest import TinyModels
from tests.support.cache_traffic import Answer, Caller, disagreement, random_tokens
from tests.support.engine_processes import engines_of
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_adapters import write_tiny_adapter
from tests.support.tiny_models import TinyArchitecture

PROMPT = random_tokens(random.Random(7), 600)


class Restarts:
    """One cache directory, and a server that is started on it again and again."""

    def __init__(self, model: Path, cache: Path) -> None:
        self._model = model
        self._cache = cache

    def ask(self, *flags: str) -> Answer:
        settings = ("--ctx-size", "4096", "--parallel", "1", "--speculate", "off", *flags)
        environment = {"REKINDLE_CACHE_DIR": str(self._cache)}
        with serve(str(self._model), *settings, environment=environment) as server:
            server.wait_for_log(" cache: ")  # what is on disk is known
            with closing(Caller(server.url)) as caller:
                answer = caller.ask(PROMPT, n_tokens=6)
            server.stop()
        return answer


@pytest.fixture
def restarts(tiny_models: TinyModels, tmp_path: Path) -> Restarts:
    return Restarts(tiny_models(TinyArchitecture.LLAMA), tmp_path / "cache")


def test_prefixes_of_an_adapter_are_its_own(restarts: Restarts, tmp_path: Path) -> None:
    adapter = write_tiny_adapter(tmp_path / "a.gguf")
    bare = restarts.ask()
    adapted = restarts.ask("--lora", str(adapter))
    again = restarts.ask("--lora-scaled", f"{adapter}:1.0")
    weaker = restarts.ask("--lora-scaled", f"{adapter}:0.5")
    write_tiny_adapter(adapter, seed=2)  # the same name, another content
    other = restarts.ask("--lora", str(adapter))
    bare_again = restarts.ask()

    assert [each.n_cached for each in (bare, adapted, weaker, other)] == [0, 0, 0, 0]
    assert again.n_cached == bare_again.n_cached == len(PROMPT)
    assert disagreement(adapted, bare) is not None
    assert disagreement(weaker, adapted) is not None
    assert disagreement(other, adapted) is not None
    assert disagreement(again, adapted) is None
    assert disagreement(bare_again, bare) is None


def test_prefixes_depend_on_rope_and_not_on_placement(restarts: Restarts) -> None:
    bare = restarts.ask()
    stretched = restarts.ask("--rope-scaling", "linear", "--rope-scale", "4")
    same = restarts.ask("--rope-freq-scale", "0.25")
    placed = restarts.ask(
        "--override-tensor", "attn=CPU", "--cpu-moe", "--no-mmap", "--no-kv-offload",
        "--device", "none", "--split-mode", "none", "--numa", "distribute",
    )  # fmt: skip
    assert stretched.n_cached == 0
    assert disagreement(stretched, bare) is not None
    assert same.n_cached == len(PROMPT)
    assert disagreement(same, stretched) is None
    assert placed.n_cached == len(PROMPT)
    assert disagreement(placed, bare) is None


def n_ctx(server: ServerProcess) -> int:
    props = httpx.get(f"{server.url}/props").json()
    found: int = props["default_generation_settings"]["n_ctx"]
    return found


def test_a_fitted_context_is_said_once_and_survives_a_crash(tiny_models: TinyModels) -> None:
    model = str(tiny_models(TinyArchitecture.LLAMA))
    with serve(model, "--fit-target", "1TiB", "--fit-ctx", "2048", "--no-cache-disk") as server:
        assert n_ctx(server) == 2048
        assert len(re.findall(r"WARNING fit: context=2048: nothing fits", server.log)) == 1
        [engine] = engines_of(server.process.pid)
        os.kill(engine, signal.SIGKILL)
        with closing(Caller(server.url)) as caller:
            caller.ask(PROMPT, n_tokens=2)
        assert engines_of(server.process.pid) != [engine]
        assert n_ctx(server) == 2048
        assert server.log.count(" fit: ") == 1


def test_what_does_not_exist_stops_the_start_in_one_sentence(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    model = str(tiny_models(TinyArchitecture.LLAMA))
    for flags, sentence in {
        ("--device", "CUDA9"): "There is no GPU named CUDA9.",
        ("--lora", str(tmp_path / "no.gguf")): f"There is no file at {tmp_path / 'no.gguf'}.",
        ("--lora", model): "expect general.type to be 'adapter'",
    }.items():
        with pytest.raises(AssertionError) as caught, serve(model, *flags):
            pass
        assert sentence in str(caught.value)
