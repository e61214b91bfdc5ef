"""Unloading a model frees its memory, and does not walk over what the start made."""

import asyncio
import gc
import weakref
from collections.abc import Callable

from rekindle.models.card import FileCard
from rekindle.models.pool import ModelPool
from rekindle.models.serving_model import ServingModel
from tests.models.test_pool import GIB, FakeModel, use


class KnottedModel(FakeModel):
    """Nothing of it goes without the collector."""

    def start(self) -> None:
        super().start()
        self.itself = self


class ForgetfulLoader:
    """Keeps nothing of what it made alive."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[KnottedModel]] = []

    def n_bytes(self, name: str) -> int:
        return GIB

    def file_card(self, name: str) -> FileCard | None:
        return None

    def load(self, name: str, on_progress: Callable[[float], bool]) -> ServingModel:
        model = KnottedModel(name, GIB)
        self.made.append(weakref.ref(model))
        return model.serving()


def test_a_model_that_is_unloaded_leaves_nothing_behind() -> None:
    async def scenario() -> list[KnottedModel | None]:
        loader = ForgetfulLoader()
        pool = ModelPool(
            ("a", "b"), loader, default=None, memory_bytes=4 * GIB, keep_alive_seconds=0.0
        )
        for _ in range(2):
            await use(pool, "a")
            await pool.unload("a")
        return [model() for model in loader.made]

    gc.collect()
    gc.freeze()  # as the server does once it has started
    n_frozen = gc.get_freeze_count()
    try:
        assert asyncio.run(scenario()) == [None, None]
        assert n_frozen / 2 < gc.get_freeze_count() <= n_frozen
    finally:
        gc.unfreeze()
