"""The stores of models that are loaded and unloaded, without any model."""

from pathlib import Path

import pytest

from rekindle.cache.fingerprint import Identity
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.config import MIB, Bytes, CacheSettings
from rekindle.errors import StartupError
from rekindle.generation.model_state import ModelClass, StateTraits
from rekindle.generation.status import CacheCounters
from rekindle.generation.stored_turns import StoredTurn
from rekindle.models.serving_model import SILENT
from rekindle.models.source import ModelFile
from rekindle.models.stores import MemoryShares, ModelStores

DENSE = StateTraits(ModelClass.DENSE, has_rows=True, has_checkpoints=False, row_bytes=1024)
IN_MEMORY = CacheSettings(cache_disk=Bytes(0))


def nothing() -> None:
    pass


def open_cache(stores: ModelStores, weights: str, traits: StateTraits = DENSE) -> PrefixCache:
    def identity_of(traits: StateTraits) -> Identity:
        return Identity(
            weights=weights,
            model_class=traits.model_class,
            type_k="f16",
            type_v="f16",
            flash_attn="auto",
            swa_full=False,
            rope_n_ctx=None,
            attn_rot_disable=None,
            state_version="1",
        )

    return stores.open_cache(identity_of, traits, nothing)


def budget_of(stores: ModelStores) -> int:
    status = stores.status()
    assert status is not None
    return status.tiers[0].budget_bytes


def test_without_a_disk_the_same_model_finds_its_cache_and_turns_again() -> None:
    stores = ModelStores(IN_MEMORY, MemoryShares(8 * MIB), None)
    cache, turns = open_cache(stores, "w"), stores.open_turns("w")
    cache.counters.prefilled_tokens += 5
    turns.keep(StoredTurn(b"i" * 16, (b"k" * 16,), b"data"))
    stores.close()
    assert open_cache(stores, "w") is cache
    assert stores.open_turns("w").find([b"k" * 16])
    assert stores.past == CacheCounters()


@pytest.mark.parametrize(
    ("weights", "traits"),
    [
        ("other", DENSE),
        ("w", StateTraits(ModelClass.HYBRID, has_rows=True, has_checkpoints=True)),
    ],
)
def test_what_changed_meanwhile_finds_nothing_and_keeps_the_counts(
    weights: str, traits: StateTraits
) -> None:
    stores = ModelStores(IN_MEMORY, MemoryShares(8 * MIB), None)
    cache = open_cache(stores, "w")
    cache.counters.prefilled_tokens += 5
    stores.close()
    other = open_cache(stores, weights, traits)
    assert other is not cache
    assert other.root != cache.root
    assert stores.past == CacheCounters(prefilled_tokens=5)


def test_with_a_disk_memory_is_given_back_and_counts_are_kept(tmp_path: Path) -> None:
    settings = CacheSettings(cache_dir=tmp_path, cache_disk=Bytes(64 * MIB))
    stores = ModelStores(settings, MemoryShares(8 * MIB), None)
    for n_loads in (1, 2):
        cache = open_cache(stores, "w")
        cache.start()
        cache.counters.prefilled_tokens += 5
        cache.close(10)
        stores.close()
        assert stores.status() is None
        assert stores.past == CacheCounters(prefilled_tokens=5 * n_loads)


def test_the_memory_budget_is_one_for_all(tmp_path: Path) -> None:
    shares = MemoryShares(8 * MIB)
    kept = ModelStores(IN_MEMORY, shares, None)
    on_disk = ModelStores(
        CacheSettings(cache_dir=tmp_path, cache_disk=Bytes(64 * MIB)), shares, None
    )
    open_cache(kept, "a")
    assert budget_of(kept) == 8 * MIB
    kept.close()
    cache = open_cache(on_disk, "b")
    assert (budget_of(kept), budget_of(on_disk)) == (4 * MIB, 4 * MIB)
    cache.start()
    cache.close(10)
    on_disk.close()
    assert budget_of(kept) == 8 * MIB


@pytest.mark.parametrize("has_disk", [True, False])
def test_two_files_never_have_the_same_weights(tmp_path: Path, *, has_disk: bool) -> None:
    disk = Bytes(64 * MIB) if has_disk else Bytes(0)
    settings = CacheSettings(cache_dir=tmp_path, cache_disk=disk)
    stores = ModelStores(settings, MemoryShares(0), None)
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
