"""`rekindle models check`: what the operator is told about a model's tool calls."""

import json
from pathlib import Path

from typer.testing import CliRunner

from rekindle.cli import app
from tests.chat.dialects.derive.shapes import JSON_OBJECT, Shape, each
from tests.conftest import TinyModels
from tests.support.tiny_models import TinyArchitecture

DERIVABLE = Shape(calls=each("{{- '<do>' }}" + JSON_OBJECT + "{{- '</do>' }}")).source
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
