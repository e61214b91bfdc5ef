"""The workloads on tiny models of every class of state, and missed targets."""

from functools import partial
from pathlib import Path

import pytest

from bench.models.classes import CLASSES, LIMITS, measure, missed, table
from bench.models.tiny import write_tiny_model_of_real_words
from rekindle.bench.peers.contenders import find_contenders
from rekindle.bench.report.results import WorkloadRow
from rekindle.bench.workloads.workloads import WORKLOADS
from rekindle.generation.model_state import ModelClass
from rekindle.llama.model import GgufModel, VocabularyFile
from tests.llama.driver import make_backend

PROMPT = "<|im_start|>assistant\nThe ledger is stale."
long = partial(pytest.param, marks=pytest.mark.long)
PEERS = ("llama-server", "xllamacpp", "llama_cpp.server")


def row(server: str, *, prefilled: int, floor: int = 1000, errors: int = 0) -> WorkloadRow:
    return WorkloadRow(
        workload="agent-loop",
        server=server,
        round=1,
        requests=13,
        errors=errors,
        prompt_tokens=9000,
        prefilled_tokens=prefilled,
        floor_tokens=floor,
        amplification=prefilled / floor,
        first_token_p50_seconds=None,
        first_token_p95_seconds=None,
        total_seconds=None,
        tokens_per_second=None,
        written_bytes=None,
        peak_memory_bytes=None,
        note="2 failed, first: out of memory" if errors else None,
    )


@pytest.mark.parametrize(
    ("name", "model_class"),
    [
        long("dense", ModelClass.DENSE),
        long("sliding-window", ModelClass.SLIDING_WINDOW),
        ("hybrid", ModelClass.HYBRID),
        long("hybrid-sliding-window", ModelClass.HYBRID),
        long("recurrent", ModelClass.RECURRENT),
    ],
)
def test_a_tiny_model_has_its_class_and_the_words_of_the_embedded_model(
    tmp_path: Path, embedded_model: Path, name: str, model_class: ModelClass
) -> None:
    path = write_tiny_model_of_real_words(tmp_path / "tiny.gguf", CLASSES[name])
    tiny, real = GgufModel(path, gpu_layers=0), GgufModel(embedded_model, gpu_layers=0)
    backend = make_backend(tiny, n_slots=2)
    assert (backend.traits.model_class, backend.traits.off_because) == (model_class, None)
    tokens, expected = (
        each.vocabulary.tokenize(PROMPT, parse_special=True) for each in (tiny, real)
    )
    assert tokens == expected
    templates = []
    for each in (path, embedded_model):
        file = VocabularyFile(each)
        templates.append(file.chat_template)
        file.close()
    assert templates[0] == templates[1]
    backend.close()
    tiny.close()
    real.close()


@pytest.mark.parametrize(
    ("ours", "theirs", "is_met"),
    [
        (row("rekindle", prefilled=1100), row("llama-server", prefilled=1100), True),
        (row("rekindle", prefilled=1101), row("llama-server", prefilled=1500), False),
        (row("rekindle", prefilled=1050), row("llama-server", prefilled=1049), False),
        (row("rekindle", prefilled=1000), row("llama-server", prefilled=990), True),
        (row("rekindle", prefilled=1050), row("llama-server", prefilled=1000, errors=1), True),
        (row("rekindle", prefilled=1000, errors=2), row("llama-server", prefilled=1500), False),
    ],
)
def test_a_target_is_missed_above_the_limit_and_above_a_peer_that_answered_all(
    ours: WorkloadRow, theirs: WorkloadRow, *, is_met: bool
) -> None:
    assert (not list(missed([theirs, ours], LIMITS["hybrid"]))) == is_met


def test_the_table_has_this_server_first_and_says_what_failed() -> None:
    rows = [row("llama-server", prefilled=1500, errors=8), row("rekindle", prefilled=1010)]
    heading, _, line = table(rows).splitlines()
    assert heading.startswith("| workload | rekindle | prefilled |")
    assert line == ("| agent-loop | 1.010 | 1,010 | 1,000 | 0 | 1.500 | 1,500 | 1,000 | 8 of 13 |")


@pytest.mark.long
def test_a_hybrid_model_recomputes_almost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.engine_run.RESULTS", tmp_path / "results")
    regenerate = [each for each in WORKLOADS if each.name == "regenerate-edit"]
    servers = find_contenders(llama_server=None, remotes=(), without=PEERS)
    rows = measure("hybrid", regenerate, servers, scale=0.3)
    assert [each.server for each in rows] == ["rekindle"]
    assert not list(missed(rows, LIMITS["hybrid"]))
