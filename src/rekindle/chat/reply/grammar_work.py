"""The grammars that one request waits for: its client may leave meanwhile."""

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from threading import Lock

from rekindle.errors import ClientLeft
from rekindle.generation.request import Grammar

StartCheck = Callable[[Grammar], Future[None]]


class GrammarWork:
    """Checks grammars one after another on a worker thread. Another thread may cancel it."""

    def __init__(self, start_check: StartCheck) -> None:
        self._start_check = start_check
        self._lock = Lock()  # of the rest
        self._current: Future[None] | None = None
        self._is_cancelled = False

    def check(self, grammar: Grammar) -> None:
        """Wait until the grammar is compiled. Raises InvalidRequest, or ClientLeft."""
        with self._lock:
            if self._is_cancelled:
                raise ClientLeft
            current = self._current = self._start_check(grammar)
        try:
            current.result()
        except CancelledError:
            raise ClientLeft from None

    def cancel(self) -> None:
        """Drop the check that waits, and refuse all later ones."""
        with self._lock:
            self._is_cancelled = True
            current = self._current
        if current is not None:
            current.cancel()
