"""SmolLM2's folder as Hugging Face has it, without the weights."""

from pathlib import Path

import pytest

from tests.vllm.convert import read_metadata, write_tokenizer


@pytest.fixture(scope="session")
def hf_folder(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "SmolLM2"
    write_tokenizer(read_metadata(embedded_model), folder)
    return folder
