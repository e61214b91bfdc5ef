"""The grammars of one request are dropped when its client leaves."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from rekindle.chat.reply.grammar_work import GrammarWork
from rekindle.errors import ClientLeft, InvalidRequest
from rekindle.generation.request import Grammar, GrammarKind

GRAMMAR = Grammar(GrammarKind.LARK, "start: /a/")


class SlowEngine:
    """Checks of grammars that end only when they are cancelled."""

    def __init__(self) -> None:
        self.started: list[Future[None]] = []
        self.has_started = threading.Event()

    def check(self, grammar: Grammar) -> Future[None]:
        assert grammar is GRAMMAR
        self.started.append(Future())
        self.has_started.set()
        return self.started[-1]


def test_a_client_that_leaves_cancels_its_check_and_all_later_ones() -> None:
    engine = SlowEngine()
    work = GrammarWork(engine.check)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(work.check, GRAMMAR)
        assert engine.has_started.wait(30)
        work.cancel()
        assert isinstance(waiting.exception(30), ClientLeft)
    assert engine.started[0].cancelled()
    with pytest.raises(ClientLeft):
        work.check(GRAMMAR)
    assert len(engine.started) == 1


def test_a_refusal_reaches_the_request() -> None:
    refused: Future[None] = Future()
    refused.set_exception(InvalidRequest("no"))
    with pytest.raises(InvalidRequest, match="no"):
        GrammarWork(lambda _: refused).check(GRAMMAR)
