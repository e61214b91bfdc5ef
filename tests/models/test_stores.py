"""The stores of models that are loaded and unloaded, without any model."""

from pathlib import Path

import pytest

from rekindle.config.cache import CacheSettings
from rekindle.config.declare import MIB, Bytes
from rekindle.errors import StartupError
from rekindle.generation.forgetting import Tombstones
from rekindle.generation.request import USUAL_TERMS
from rekindle.generation.status import CacheCounters
from rekindle.generation.stored_turns import StoredTurn
from rekindle.models.serving_model import SILENT
from rekindle.models.source import ModelFile
from rekindle.models.stores import MemoryShares, ModelStores

IN_MEMORY = CacheSettings(cache_disk=Bytes(0))
TURN = StoredTurn(b"i" * 16, (b"k" * 16,), b"data", USUAL_TERMS.owner)


def test_without_a_disk_the_same_weights_find_their_turns_again() -> None:
    stores = ModelStores(IN_MEMORY, MemoryShares(8 * MIB), None, Tombstones())
    stores.open_turns("w").keep(TURN)
    stores.close(CacheCounters(), {})
    assert stores.open_turns("w").find([b"k" * 16])
    assert not stores.open_turns("other").find([b"k" * 16])


def test_what_an_unloaded_model_counted_stays_counted(tmp_path: Path) -> None:
    settings = CacheSettings(cache_dir=tmp_path, cache_disk=Bytes(64 * MIB))
    stores = ModelStores(settings, MemoryShares(8 * MIB), None, Tombstones())
    for n_loads in (1, 2):
        stores.memory_share()
        stores.open_turns("w")
        stores.close(CacheCounters(prefilled_tokens=5), {"abort": 1})
        assert stores.past == CacheCounters(prefilled_tokens=5 * n_loads)
        assert stores.past_restarts == {"abort": n_loads}


def test_the_memory_budget_is_one_for_all_loaded_models() -> None:
    shares = MemoryShares(8 * MIB)
    one, other = (ModelStores(IN_MEMORY, shares, None, Tombstones()) for _ in range(2))
    budgets: list[int] = []
    assert one.memory_share() == 8 * MIB
    one.follow_budget(budgets.append)
    assert other.memory_share() == 4 * MIB
    assert budgets == [4 * MIB]
    other.close(CacheCounters(), {})
    assert budgets == [4 * MIB, 8 * MIB]


@pytest.mark.parametrize("has_disk", [True, False])
def test_two_files_never_have_the_same_weights(tmp_path: Path, *, has_disk: bool) -> None:
    disk = Bytes(64 * MIB) if has_disk else Bytes(0)
    settings = CacheSettings(cache_dir=tmp_path, cache_disk=disk)
    stores = ModelStores(settings, MemoryShares(0), None, Tombstones())
    files = [ModelFile(tmp_path / f"{name}.gguf", name) for name in ("a", "b")]
    for file in files:
        file.path.write_bytes(file.name.encode())
    first, second = (stores.weights(file, SILENT.on_digest) for file in files)
    assert first != second
    assert stores.weights(files[0], SILENT.on_digest) == first
    files[0].path.write_bytes(b"another one")
    assert stores.weights(files[0], SILENT.on_digest) != first
    with pytest.raises(StartupError):
        stores.weights(ModelFile(tmp_path / "none.gguf", "none"), SILENT.on_digest)
