"""What the files of a model recommend, and what of it is left out."""

import logging
from pathlib import Path

import pytest
from gguf import GGUFWriter

from rekindle.config.file_sampling import recommended
from rekindle.generation.request import Sampling
from rekindle.llama.model import GgufModel
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

NAMES = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n")
SAME = {name: name for name in NAMES}


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("temperature", "0.60", 0.6),
        ("temperature", 0, 0.0),
        ("top_k", "20", 20),
        ("top_k", -1, 0),
        ("repeat_last_n", "-1", -1),
        ("min_p", 1, 1.0),
    ],
)
def test_values_in_range_are_taken(name: str, value: object, taken: float) -> None:
    found = recommended(SAME, {name: value})
    assert found == {name: taken}
    assert type(found[name]) is type(getattr(Sampling(), name))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "nan"),
        ("temperature", float("nan")),
        ("temperature", "inf"),
        ("temperature", "-1"),
        ("temperature", "warm"),
        ("top_k", "1e300"),
        ("top_k", 10**400),
        ("top_k", -2),
        ("top_p", 1.5),
        ("min_p", [0.5]),
        ("repeat_penalty", 0),
        ("repeat_last_n", "-inf"),
    ],
)
def test_values_out_of_range_are_left_out_with_a_line(
    name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert recommended({**SAME, "typical_p": "other"}, {name: value, "other": 0.5}) == {
            "typical_p": 0.5
        }
    [line] = caplog.messages
    assert name in line


def test_a_model_file_with_wild_values_is_served_with_the_others(tmp_path: Path) -> None:
    floats = {"temp": float("nan"), "min_p": float("inf"), "top_p": 0.5}

    def recommend(writer: GGUFWriter) -> None:
        for key, value in floats.items():
            writer.add_float32(f"general.sampling.{key}", value)
        writer.add_string("general.sampling.penalty_repeat", "much")
        writer.add_int32("general.sampling.top_k", -7)

    path = write_tiny_model(tmp_path / "m.gguf", TinyArchitecture.LLAMA, and_write=recommend)
    model = GgufModel(path, gpu_layers=0)
    try:
        assert model.facts.default_sampling == Sampling(top_p=0.5)
    finally:
        model.close()
