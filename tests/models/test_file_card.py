"""What a file says of a model that is not loaded."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from rekindle.cache.shared.connection import SharedStore
from rekindle.chat.accounts.accounts import Accounts
from rekindle.config.settings import Settings
from rekindle.generation.forgetting import Tombstones
from rekindle.llama.model import GgufModel
from rekindle.models.card import FileCard
from rekindle.models.files.file_card import read_file_card
from rekindle.models.loader import ModelLoader
from rekindle.models.serving_model import ServerParts
from tests.conftest import TinyModels
from tests.support.tiny_models import TinyArchitecture, write_tiny_model
from tests.support.tiny_vocabulary import CHAT_TEMPLATE

NO_STORE: SharedStore | None = None


@pytest.mark.parametrize("architecture", [TinyArchitecture.LLAMA, TinyArchitecture.MAMBA2])
def test_a_file_says_what_the_loaded_model_does(
    architecture: TinyArchitecture, tiny_models: TinyModels
) -> None:
    path = tiny_models(architecture)
    model = GgufModel(path, gpu_layers=0)
    facts = model.facts
    model.close()
    shared = {each.name for each in fields(FileCard)} - {"chat_template", "quantization"}
    read = read_file_card([path])
    assert {name: getattr(read, name) for name in shared} == {
        name: getattr(facts, name) for name in shared
    }
    assert read.chat_template == CHAT_TEMPLATE


def test_the_shards_of_a_model_count_together(tiny_models: TinyModels) -> None:
    path = tiny_models(TinyArchitecture.LLAMA)
    one, two = read_file_card([path]), read_file_card([path, path])
    assert two == replace(one, n_params=2 * one.n_params, size_bytes=2 * one.size_bytes)


def test_a_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", TinyArchitecture.LLAMA, context_length=256)
    sources = {"m": str(path), "gone": str(tmp_path / "gone.gguf"), "far": "hf:owner/repo/f.gguf"}
    forgotten = Tombstones()
    parts = ServerParts(Settings(), Accounts(forgotten), (), forgotten)
    loader = ModelLoader(sources, parts, NO_STORE)
    first = loader.file_card("m")
    assert first is not None
    assert first is loader.file_card("m")
    write_tiny_model(path, TinyArchitecture.LLAMA, context_length=512)
    changed = loader.file_card("m")
    assert changed == replace(first, n_ctx_train=512)
    path.write_bytes(path.read_bytes()[:1000])
    assert [loader.file_card(name) for name in sources] == [None, None, None]
