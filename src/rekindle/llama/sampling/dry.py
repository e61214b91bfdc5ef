"""DRY samplers. llama.cpp looks for the sequence breakers in the whole vocabulary, once per kind.

That takes 0.03 s for the default breakers and 49,152 tokens, and 0.2 s for a word. Clones take
microseconds.
"""

import ctypes
import weakref
from threading import Lock
from typing import Any

from rekindle.bounded_cache import BoundedCache
from rekindle.generation.request import Sampling
from rekindle.llama.library import lib
from rekindle.llama.tokenizer.vocabulary import Vocabulary

MAX_KINDS = 8  # picked

Kind = tuple[float, float, int, int, tuple[str, ...]]


class DrySamplers:
    """Makes samplers for one vocabulary. Any thread may call it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = Lock()
        self._prototypes: BoundedCache[Kind, _Prototype] = BoundedCache(max_items=MAX_KINDS)

    def new(self, sampling: Sampling) -> Any:
        """Return a sampler that has seen no token. The caller frees it."""
        kind = (
            sampling.dry_multiplier,
            sampling.dry_base,
            sampling.dry_allowed_length,
            sampling.dry_penalty_last_n,
            sampling.dry_sequence_breakers,
        )
        with self._lock:
            prototype = self._prototypes.get(kind)
        if prototype is None:
            prototype = _Prototype(kind, self._vocabulary)  # may take long: without the lock
            with self._lock:
                self._prototypes.put(kind, prototype)
        return lib.llama_sampler_clone(prototype.sampler)


class _Prototype:
    def __init__(self, kind: Kind, vocabulary: Vocabulary) -> None:
        *numbers, breakers = kind
        texts = [each.encode() for each in breakers]
        self.sampler = lib.llama_sampler_init_dry(
            vocabulary.handle, *numbers, (ctypes.c_char_p * len(texts))(*texts), len(texts)
        )
        weakref.finalize(self, lib.llama_sampler_free, self.sampler).atexit = False
