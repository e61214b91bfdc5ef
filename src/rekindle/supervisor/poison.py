"""Prompts that crashed the engine, so that a client that retries does not crash it again."""

from array import array
from hashlib import blake2b

from rekindle.bounded_cache import BoundedCache
from rekindle.errors import RequestCrashed
from rekindle.generation.request import GenerationRequest

MAX_PROMPTS = 256  # picked
REFUSED_CRASHES = 2  # of one prompt: the second time, nothing stored can be at fault


class PoisonedPrompts:
    def __init__(self) -> None:
        self._n_crashes = BoundedCache[bytes, int](max_items=MAX_PROMPTS)

    def check(self, request: GenerationRequest) -> bool:
        """Return whether the prompt has crashed the engine. Raises RequestCrashed after two."""
        if not len(self._n_crashes):
            return False
        n_crashes = self._n_crashes.get(_key(request)) or 0
        if n_crashes >= REFUSED_CRASHES:
            raise RequestCrashed(
                "This prompt has crashed the engine process again and again. The server refuses"
                " it until the next restart."
            )
        return n_crashes > 0

    def add(self, request: GenerationRequest) -> None:
        key = _key(request)
        self._n_crashes.put(key, (self._n_crashes.get(key) or 0) + 1)

    def forgive(self, request: GenerationRequest) -> None:
        """Forget the crashes of a prompt whose reply has ended."""
        if len(self._n_crashes):
            self._n_crashes.pop(_key(request))


def _key(request: GenerationRequest) -> bytes:
    digest = blake2b(array("q", request.prompt).tobytes(), digest_size=16)
    digest.update(request.terms.namespace.encode())
    return digest.digest()
