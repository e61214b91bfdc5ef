"""Names of models to loaded models: which source each name has, and which factory loads it."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.cache.shared.connection import SharedStore
from rekindle.config.choices import EngineKind
from rekindle.errors import ShuttingDown, StartupError
from rekindle.generation.forgetting import Tombstone
from rekindle.generation.status import CacheCounters
from rekindle.llama.placement.gguf_header import shards
from rekindle.models.card import FileCard
from rekindle.models.files.file_card import read_file_card
from rekindle.models.llama_model import OpenedModel, load_llama
from rekindle.models.serving_model import SILENT, LoadProgress, ServerParts, ServingModel
from rekindle.models.source import HUB, ModelFile, resolve_model
from rekindle.models.stores import MemoryShares, ModelStores, cache_memory_bytes, state_of

if TYPE_CHECKING:  # `vllm_model` imports an HTTP client, which few servers need
    from rekindle.models.vllm_model import UpstreamSource


class ModelLoader:
    """Loads models by name. The stores of a model outlive its loads."""

    def __init__(
        self, sources: Mapping[str, str], parts: ServerParts, shared: SharedStore | None
    ) -> None:
        self._sources = sources
        self._parts = parts
        self._file_cards: dict[str, tuple[str, FileCard]] = {}  # with the state of the files
        settings = parts.settings.cache
        shares = MemoryShares(cache_memory_bytes(settings))
        self._stores = {
            name: ModelStores(settings, shares, shared, parts.forgotten) for name in sources
        }

    def n_bytes(self, name: str) -> int:
        return 0 if self._has_upstreams else resolve_model(self._sources[name]).n_bytes

    def file_card(self, name: str) -> FileCard | None:
        """Read the header of a local file, once. None: it cannot be read, or is elsewhere."""
        source = self._sources[name]
        if self._has_upstreams or source.startswith(HUB):
            return None
        files = shards(Path(source).expanduser())
        try:
            state = state_of(files)
            if name not in self._file_cards or self._file_cards[name][0] != state:
                self._file_cards[name] = state, read_file_card(files)
            return self._file_cards[name][1]
        except StartupError:  # a load will say why
            return None

    def load(self, name: str, on_progress: Callable[[float], bool]) -> ServingModel:
        if self._has_upstreams:
            from rekindle.models.vllm_model import find_upstreams

            return self.load_from(name, find_upstreams(self._parts.settings))

        def on_digest(_done: int, _total: int) -> None:
            if not on_progress(0.0):
                raise ShuttingDown("The server is shutting down.")

        file = resolve_model(self._sources[name])
        return self.load_from(name, file, LoadProgress(on_progress, on_digest))

    def load_from(
        self,
        name: str,
        source: "ModelFile | UpstreamSource",
        progress: LoadProgress = SILENT,
        opened: OpenedModel | None = None,
    ) -> ServingModel:
        """Load a model whose source is already resolved."""
        stores = self._stores[name]
        parts = replace(self._parts, settings=self._parts.settings.of(name))
        if isinstance(source, ModelFile):
            return load_llama(parts, name, source, stores, progress, opened)
        from rekindle.models.vllm_model import load_upstream

        return load_upstream(parts, name, source, stores)

    def forget(self, tombstone: Tombstone) -> int:
        """Delete the turns of every model that the deletion covers. Return how many.

        Blocking. Raises TierFailed.
        """
        return sum(stores.forget(tombstone) for stores in self._stores.values())

    def past(self) -> CacheCounters:
        """Return the counters of all closed caches, summed."""
        return sum((stores.past for stores in self._stores.values()), CacheCounters())

    def past_restarts(self) -> dict[str, int]:
        """Return the restarts of the engines of all unloaded models, by cause."""
        return sum((stores.past_restarts for stores in self._stores.values()), Counter())

    @property
    def _has_upstreams(self) -> bool:
        return self._parts.settings.engine.engine is EngineKind.VLLM
