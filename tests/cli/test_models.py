"""`rekindle models check`: what the operator is told about a model, and about its tool calls."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rekindle.cli import app
from tests.chat.dialects.derive.shapes import JSON_OBJECT, Shape, each
from tests.conftest import TinyModels
from tests.support.tiny_models import N_LAYER, SLIDING_WINDOW, TinyArchitecture, write_tiny_model

DERIVABLE = Shape(calls=each("{{- '<do>' }}" + JSON_OBJECT + "{{- '</do>' }}")).source
FIM = ("pre", "suf", "mid")
MUTE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def check(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["models", "check", *arguments])
    return done.exit_code, done.stdout


def test_a_template_is_checked_without_a_model(tmp_path: Path) -> None:
    template = tmp_path / "a.jinja"
    template.write_text(DERIVABLE)
    code, said = check(str(template))
    assert code == 0
    assert "derived: JSON between <do> and </do>" in said
    assert "between '<muse>' and '</muse>'" in said


def test_a_template_that_writes_no_calls_says_so_and_fails_the_check(tmp_path: Path) -> None:
    template = tmp_path / "mute.jinja"
    template.write_text(MUTE)
    code, said = check(str(template))
    assert code == 1
    assert "generic form: the template writes no calls" in said


def test_a_model_is_checked_with_its_own_vocabulary(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    model = str(tiny_models(TinyArchitecture.LLAMA))
    template = tmp_path / "a.jinja"
    template.write_text(DERIVABLE)
    code, said = check(model, "--chat-template", str(template), "--json")
    report = json.loads(said)
    assert code == 0
    assert report["origin"] == "derived"
    assert report["losses"] == []
    assert report["refused_by_grammar"] == []
    assert report["reasoning_assumed"] is False


def test_a_template_takes_no_other_template(tmp_path: Path) -> None:
    template = tmp_path / "a.jinja"
    template.write_text(DERIVABLE)
    done = CliRunner().invoke(app, ["models", "check", str(template), "--chat-template", "chatml"])
    assert "is for a GGUF file" in str(getattr(done.exception, "message", ""))


def test_a_file_that_is_no_model_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_text("nonsense")
    done = CliRunner().invoke(app, ["models", "check", str(tmp_path / "a.gguf")])
    assert type(done.exception).__name__ == "StartupError"


def facts(*arguments: str) -> dict[str, Any]:
    code, said = check(*arguments, "--json")
    assert code in (0, 1)
    model: dict[str, Any] = json.loads(said)["model"]
    return model


def test_the_embedded_model_is_described_without_being_loaded(embedded_model: Path) -> None:
    model = facts(str(embedded_model))
    assert model["architecture"] == "llama"
    assert model["quantization"] == "Q8_0"
    assert model["class"] == "dense"
    assert model["n_ctx_train"] == 8192
    assert model["bytes_per_10k_tokens"] == 230_400_000  # as docs/capacity.md says
    assert model["fits"]["fits"]
    assert model["fits"]["n_ctx"] == 8192
    assert (model["generates"], model["embeds_with"], model["reranks"]) == (True, "mean", False)
    code, said = check(str(embedded_model), "--cache-type-k", "q8_0", "--cache-type-v", "q8_0")
    assert code == 1  # its template writes no calls
    assert "llama 135M Q8_0, 143 MB of weights" in said
    assert "122 MB for 10,000 tokens (K q8_0, V q8_0)" in said
    assert "yes: a context of 8,192 tokens takes" in said


@pytest.mark.parametrize(
    ("architecture", "model_class", "n_row_layers", "has_checkpoints"),
    [
        (TinyArchitecture.LLAMA, "dense", N_LAYER, False),
        (TinyArchitecture.QWEN3_MOE, "dense", N_LAYER, False),
        (TinyArchitecture.GEMMA3, "sliding_window", 1, True),
        (TinyArchitecture.QWEN35, "hybrid", N_LAYER // 2, True),
        (TinyArchitecture.LFM2_SWA, "hybrid", 0, True),
        (TinyArchitecture.MAMBA2, "recurrent", 0, True),
    ],
)
def test_every_class_of_models_is_told_with_its_bytes(
    tiny_models: TinyModels,
    architecture: TinyArchitecture,
    model_class: str,
    n_row_layers: int,
    *,
    has_checkpoints: bool,
) -> None:
    model = facts(str(tiny_models(architecture)))
    row_bytes = 256  # of a layer: 2 KV heads of 32 values, K and V, in F16
    assert model["class"] == model_class
    assert model["bytes_per_10k_tokens"] == 10_000 * n_row_layers * row_bytes
    assert bool(model["checkpoint_bytes"]) == has_checkpoints
    assert model["experts"] == (architecture is TinyArchitecture.QWEN3_MOE)
    if architecture is TinyArchitecture.GEMMA3:
        assert model["checkpoint_bytes"] == SLIDING_WINDOW * 3 * row_bytes


def test_a_context_that_is_too_long_does_not_fit(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", TinyArchitecture.LLAMA, context_length=2**30)
    assert facts(str(path), "--ctx-size", str(2**30))["fits"]["fits"] is False
    fitted = facts(str(path))["fits"]
    assert fitted["fits"]
    assert 4096 <= fitted["n_ctx"] < 2**30


def test_abilities_are_read_from_the_metadata(tmp_path: Path) -> None:
    plain = facts(str(write_tiny_model(tmp_path / "a.gguf", TinyArchitecture.LLAMA)))
    assert (plain["fills_in"], plain["fim"]) == (False, {})
    fim = {f"tokenizer.ggml.fim_{name}_token_id": 300 + n for n, name in enumerate(FIM)}
    metadata = {**fim, "llama.pooling_type": 4}
    path = write_tiny_model(tmp_path / "b.gguf", TinyArchitecture.LLAMA, metadata=metadata)
    model = facts(str(path))
    assert (model["fills_in"], set(model["fim"])) == (True, {"prefix", "suffix", "middle"})
    assert (model["embeds_with"], model["reranks"]) == (None, True)


def test_a_truncated_file_is_one_sentence(tiny_models: TinyModels, tmp_path: Path) -> None:
    whole = tiny_models(TinyArchitecture.LLAMA).read_bytes()
    for size in (4, 100, len(whole) // 2):
        path = tmp_path / f"{size}.gguf"
        path.write_bytes(whole[:size])
        done = CliRunner().invoke(app, ["models", "check", str(path)])
        assert type(done.exception).__name__ == "StartupError"
        assert "is truncated" in str(getattr(done.exception, "message", ""))


def test_a_wrong_type_of_rows_is_refused(tiny_models: TinyModels) -> None:
    arguments = ["models", "check", str(tiny_models(TinyArchitecture.LLAMA))]
    done = CliRunner().invoke(app, [*arguments, "--cache-type-k", "f8"])
    assert "cache_type_k must be one of" in str(getattr(done.exception, "message", ""))
