"""The time and memory that one rendering may use.

A template runs in our process, so nothing outside can stop it. Compiled templates call `tick` in
every loop and every macro, and `charge` with every value that they make.
"""

from collections.abc import Iterable
from itertools import chain
from sys import getrefcount, getsizeof
from time import monotonic, thread_time
from typing import Any

from jinja2.exceptions import SecurityError

MAX_SECONDS = 10.0  # of the thread's own time; picked
# Characters of the prompt, of a value, or of all strings in a list. The longest body that a
# client may send has half of it.
MAX_CHARACTERS = 64 * 2**20
MAX_KEPT_BYTES = 256 * 2**20  # of values at one time; picked
MAX_SMALL_BYTES = 512 * 2**20  # of all small values together, most of them garbage; picked
MAX_INTEGER_BITS = 2**16

_SMALL = 16 * 2**10  # characters
_OBJECT_BYTES = 64
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS = (list, tuple, dict, *_VIEWS)


class Budget:
    """Use one for each rendering, on one thread."""

    def __init__(self) -> None:
        self.is_late = False
        self._last_second = thread_time() + MAX_SECONDS
        self._next_look = monotonic() + MAX_SECONDS
        self._small_bytes = 0
        self._kept_bytes = 0
        # Large values by id, so that no id is used twice. Garbage leaves when room is short.
        self._kept: dict[int, Any] = {}
        self._weights: dict[int, int] = {}
        self._inner: set[int] = set()  # ids of containers inside other containers

    def tick(self) -> None:
        """Raise an error after the deadline."""
        if monotonic() > self._next_look:  # cheaper to read than the thread's clock
            left = self._last_second - thread_time()
            if left <= 0:
                self.is_late = True
                raise SecurityError(f"rendering takes more than {MAX_SECONDS:g} seconds")
            self._next_look = monotonic() + left

    def charge(self, value: Any) -> Any:
        """Count a value that the template made, and return it."""
        if type(value) is str and len(value) < _SMALL:
            self._small_bytes += _OBJECT_BYTES + len(value)
            if self._small_bytes > MAX_SMALL_BYTES:
                raise SecurityError("the template makes too many values")
        elif isinstance(value, str):
            check_length(len(value))
            self._keep(value)
        elif isinstance(value, _CONTAINERS):
            self.weigh(value)
        elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise SecurityError("a number in the template is too large")
        return value

    def weigh(self, value: Any) -> int:
        """Return the length of the value, written out. Lists may hold one object many times."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, _CONTAINERS):
            return 1
        weight = self._weights.get(id(value))
        if weight is None:
            self._weights[id(value)] = MAX_CHARACTERS + 1  # for a list that holds itself
            weight = 1
            for item in _items(value):
                weight += 1 + self.weigh(item)
                if isinstance(item, _CONTAINERS):
                    self._inner.add(id(item))
            check_length(weight)
            self._weights[id(value)] = weight
            self._keep(value)
        return weight

    def joined(self, left: list[Any], right: list[Any]) -> list[Any]:
        """Return both lists as one, weighed without a look at each item."""
        weight = self.weigh(left) + self.weigh(right)
        check_length(weight)
        both = left + right
        self._weights[id(both)] = weight
        self._keep(both)
        return both

    def grow(self, owner: Any, *added: Any) -> None:
        """Count values that are about to be added to a list or a dictionary."""
        weight = self.weigh(owner) + sum(1 + self.weigh(each) for each in added)
        check_length(weight)
        self._small_bytes += _OBJECT_BYTES
        self._inner.update(id(each) for each in added if isinstance(each, _CONTAINERS))
        self._weights[id(owner)] = weight

    def weigh_again(self, owner: Any) -> None:
        """Weigh everything that may hold a container which has grown."""
        if id(owner) in self._inner:
            self._weights.clear()
            for value in list(self._kept.values()):
                self.weigh(value)

    def _keep(self, value: Any) -> None:
        if id(value) in self._kept:
            return
        self._kept[id(value)] = value
        self._kept_bytes += getsizeof(value)
        if self._kept_bytes > MAX_KEPT_BYTES:
            self._sweep()
            if self._kept_bytes > MAX_KEPT_BYTES:
                raise SecurityError(
                    f"the template needs more than {MAX_KEPT_BYTES // 2**20} MiB of memory"
                )

    def _sweep(self) -> None:
        """Let go of values that the template no longer uses."""
        kept, self._kept, self._kept_bytes = self._kept, {}, 0
        kept[0] = object()  # taken first: it has the references of this loop alone
        n_alone = 0
        while kept:
            key, value = kept.popitem()
            n_alone = n_alone or getrefcount(value)
            if getrefcount(value) > n_alone:
                self._kept[key] = value
                self._kept_bytes += getsizeof(value)
            else:
                self._weights.pop(key, None)
                self._inner.discard(key)


def check_length(n_characters: int) -> None:
    if n_characters > MAX_CHARACTERS:
        raise SecurityError(
            f"a value in the template is longer than {MAX_CHARACTERS // 2**20} Mi characters"
        )


def _items(value: Any) -> Iterable[Any]:
    mapping: Any = value.mapping if type(value) in _VIEWS else value
    return mapping if isinstance(mapping, list | tuple) else chain(mapping, mapping.values())
