"""Grammars that the server wants compiled, on two threads: light ones never wait for heavy ones.

Clients choose their grammars, and a native call cannot be interrupted. The thread for light
grammars takes only those that compile in a moment. The other thread takes all, in order of arrival.
A check whose client has left is dropped unless it has begun.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from rekindle.generation.request import Grammar
from rekindle.link.activity_page import ActivityPage

Check = Callable[[Grammar], None]
IsLight = Callable[[Grammar], bool]
# The numbers of the threads on the activity page. The first ones prepare samplers.
HEAVY, LIGHT = 2, 3


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    number: int
    grammar: Grammar
    is_light: bool
    outcome: Future[None] = field(default_factory=Future)


class GrammarChecks:
    """`check` compiles a grammar on one of the threads. `is_light` is called by `submit`."""

    def __init__(self, check: Check, is_light: IsLight, page: ActivityPage) -> None:
        self._check = check
        self._is_light = is_light
        self._page = page
        self._waiting: deque[_Job] = deque()
        self._has_changed = threading.Condition()
        self._is_closed = False
        for preparer, name in ((HEAVY, "grammar-heavy"), (LIGHT, "grammar-light")):
            threading.Thread(target=self._run, args=(preparer,), name=name, daemon=True).start()

    def submit(self, number: int, grammar: Grammar) -> Future[None]:
        try:
            is_light = self._is_light(grammar)
        except Exception:  # the check will report it
            is_light = False
        job = _Job(number, grammar, is_light)
        with self._has_changed:
            self._waiting.append(job)
            self._has_changed.notify_all()
        return job.outcome

    def cancel(self, number: int) -> None:
        """Drop the check if it waits."""
        with self._has_changed:
            job = next((each for each in self._waiting if each.number == number), None)
            if job is not None:
                self._waiting.remove(job)
                job.outcome.cancel()

    def close(self) -> None:
        """End the threads after the checks that they are at."""
        with self._has_changed:
            self._is_closed = True
            self._has_changed.notify_all()

    def _run(self, preparer: int) -> None:
        while (job := self._next(only_light=preparer == LIGHT)) is not None:
            self._page.prepare(job.number, preparer)
            try:
                job.outcome.set_result(self._check(job.grammar))
            except BaseException as error:  # as an executor does: the thread goes on
                job.outcome.set_exception(error)
            finally:
                self._page.prepare(0, preparer)

    def _next(self, *, only_light: bool) -> _Job | None:
        with self._has_changed:
            while not self._is_closed:
                for job in self._waiting:
                    if job.is_light or not only_light:
                        self._waiting.remove(job)
                        return job
                self._has_changed.wait()
            return None
