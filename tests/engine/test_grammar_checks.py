"""Grammars for the server are compiled on two threads: heavy ones do not hold up light ones."""

import threading
from collections.abc import Iterator

import pytest

from rekindle.engine_process.grammar_checks import GrammarChecks
from rekindle.errors import InvalidRequest
from rekindle.generation.request import Grammar, GrammarKind
from rekindle.link.activity_page import ActivityPage, new_page_file

PATIENCE = 30  # seconds


def grammar(source: str) -> Grammar:
    return Grammar(GrammarKind.LARK, source)


class Compiler:
    """Compiles heavy grammars only when it is released."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def check(self, grammar: Grammar) -> None:
        self.began.append(grammar.source)
        if grammar.source.startswith("heavy"):
            self.has_begun.set()
            assert self.may_end.wait(PATIENCE)
        if grammar.source == "bad":
            raise InvalidRequest("bad grammar")


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def page() -> ActivityPage:
    return ActivityPage(new_page_file())


@pytest.fixture
def checks(compiler: Compiler, page: ActivityPage) -> Iterator[GrammarChecks]:
    def is_light(grammar: Grammar) -> bool:
        return not grammar.source.startswith("heavy")

    checks = GrammarChecks(compiler.check, is_light, page)
    yield checks
    compiler.may_end.set()
    checks.close()


def test_a_light_grammar_does_not_wait_for_heavy_ones(
    checks: GrammarChecks, compiler: Compiler, page: ActivityPage
) -> None:
    heavy = [checks.submit(number, grammar(f"heavy {number}")) for number in range(1, 9)]
    assert compiler.has_begun.wait(PATIENCE)
    checks.submit(9, grammar("light")).result(PATIENCE)
    with pytest.raises(InvalidRequest):
        checks.submit(10, grammar("bad")).result(PATIENCE)
    assert not any(each.done() for each in heavy)
    assert page.last().preparing == (1,)
    compiler.may_end.set()
    for each in heavy:
        each.result(PATIENCE)


def test_a_check_whose_client_has_left_is_never_begun(
    checks: GrammarChecks, compiler: Compiler
) -> None:
    first = checks.submit(1, grammar("heavy 1"))
    left = checks.submit(2, grammar("heavy 2"))
    third = checks.submit(3, grammar("heavy 3"))
    assert compiler.has_begun.wait(PATIENCE)
    checks.cancel(1)  # it has begun, and ends
    checks.cancel(2)
    checks.cancel(4)  # not known
    compiler.may_end.set()
    third.result(PATIENCE)
    first.result(PATIENCE)
    assert left.cancelled()
    assert compiler.began == ["heavy 1", "heavy 3"]
