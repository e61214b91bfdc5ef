"""Questions to an engine that wait for their answer, also across a restart."""

import asyncio
import logging
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from rekindle.bounded_cache import BoundedCache
from rekindle.errors import EngineFailed, RekindleError, RequestCrashed
from rekindle.generation.request import Grammar, GrammarKind
from rekindle.link.activity_page import LastActivity
from rekindle.link.encoding import error_of
from rekindle.link.messages import Answer, AskPrefixes, CancelCheck, CheckGrammar, NoAnswer
from rekindle.supervisor.lives import EngineLives

_log = logging.getLogger("rekindle.engine")

GRAMMAR_SECONDS = 60.0  # to compile a grammar, with the wait for others; picked
RETRY_SECONDS = 10
MAX_COMPILED = 4096  # grammars known to compile; picked
FATAL_DEATHS = 2  # while the question was answered, or the grammar compiled
MAX_FATAL = 256  # grammars that crashed the engine; picked

_GrammarKey = tuple[GrammarKind, bytes]


@dataclass(slots=True, eq=False)
class _OpenQuestion:
    order: AskPrefixes | CheckGrammar
    answer: asyncio.Future[Any]  # the encoded answer
    n_deaths: int = 0


class OpenQuestions:
    def __init__(self, lives: EngineLives) -> None:
        self._lives = lives
        self._open: dict[int, _OpenQuestion] = {}
        self._asides: set[asyncio.Future[Any]] = set()
        self._compiled = BoundedCache[_GrammarKey, bool](max_items=MAX_COMPILED)
        self._fatal = BoundedCache[_GrammarKey, bool](max_items=MAX_FATAL)

    async def ask(self, order: AskPrefixes | CheckGrammar) -> Any:
        """Return the encoded answer."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[order.number] = _OpenQuestion(order, answer)
        try:
            self._lives.send(order)
            return await answer
        except asyncio.CancelledError:
            if isinstance(order, CheckGrammar):
                self._lives.send(CancelCheck(order.number))
            raise
        finally:
            del self._open[order.number]

    async def check(self, grammar: Grammar, number: int) -> None:
        """Let the engine compile the grammar, unless it has done so.

        Raises InvalidRequest, EngineFailed if it takes too long, and RequestCrashed if the engine
        died of it, now or before.
        """
        key = _key(grammar)
        if self._compiled.get(key) and not grammar.samples:
            return
        if self._fatal.get(key):
            raise RequestCrashed(
                f"This {grammar.kind} has crashed the engine process. The server refuses it until"
                " the next restart."
            )
        try:
            async with asyncio.timeout(GRAMMAR_SECONDS):
                await self.ask(CheckGrammar(number, grammar))
        except TimeoutError:
            # Not the client's fault for sure: the engine may be restarting, or busy with others.
            raise EngineFailed(
                f"This {grammar.kind} was not compiled within {GRAMMAR_SECONDS:g} s.",
                retry_after_seconds=RETRY_SECONDS,
            ) from None
        self._compiled.put(key, True)  # noqa: FBT003

    def ask_aside(self, order: AskPrefixes) -> None:
        """Ask without waiting for the answer."""
        asking = asyncio.ensure_future(self.ask(order))
        self._asides.add(asking)

        def answered(asking: "asyncio.Future[Any]") -> None:
            self._asides.discard(asking)
            if not asking.cancelled() and (error := asking.exception()) is not None:
                _log.warning("engine: question failed: %s", error)

        asking.add_done_callback(answered)

    def on_answer(self, report: Answer | NoAnswer) -> None:
        question = self._open.get(report.number)
        if question is None or question.answer.done():
            return  # nobody waits any more
        match report:
            case Answer(_, value):
                question.answer.set_result(value)
            case NoAnswer(_, error):
                question.answer.set_exception(error_of(error))

    def ask_again(self) -> None:
        """Send every open question to a new process."""
        for question in self._open.values():
            self._lives.send(question.order)

    def note_death(self, doing: LastActivity) -> bool:
        """Count a death for the question that the engine was at. The second one fails it.

        Return whether one has failed. All that ask for the same grammar fail with it.
        """
        has_failed = False
        for number in {*doing.numbers, *doing.preparing}:
            if (question := self._open.get(number)) is None:
                continue
            question.n_deaths += 1
            if question.n_deaths >= FATAL_DEATHS and not question.answer.done():
                has_failed = True
                self._fail(question)
        return has_failed

    def _fail(self, question: _OpenQuestion) -> None:
        failed, what = [question], "answered this question"
        if isinstance(question.order, CheckGrammar):
            key, what = _key(question.order.grammar), "compiled this grammar"
            self._fatal.put(key, True)  # noqa: FBT003
            failed = [
                each
                for each in self._open.values()
                if isinstance(each.order, CheckGrammar) and _key(each.order.grammar) == key
            ]
        for each in failed:
            if not each.answer.done():
                message = f"The engine process died {question.n_deaths} times while it {what}."
                each.answer.set_exception(RequestCrashed(message))

    def fail_all(self, error: RekindleError) -> None:
        for question in self._open.values():
            if not question.answer.done():
                question.answer.set_exception(error)


def _key(grammar: Grammar) -> _GrammarKey:
    return grammar.kind, blake2b(grammar.source.encode(), digest_size=16).digest()
