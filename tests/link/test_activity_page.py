"""The activity page: the server reads what the engine process wrote last."""

import os

import pytest

from rekindle.link.activity_page import (
    MAX_NUMBERS,
    Activity,
    ActivityPage,
    LastActivity,
    Pulse,
    new_page_file,
)


class Pages:
    def __init__(self) -> None:
        file = new_page_file()
        self.engine, self.server = ActivityPage(file), ActivityPage(file)
        os.close(file)


@pytest.fixture
def pages() -> Pages:
    return Pages()


def test_a_new_page_is_of_a_process_that_starts(pages: Pages) -> None:
    assert pages.server.last() == LastActivity(Activity.STARTING, (), (), 0)
    assert pages.server.pulse() == Pulse(0, 0, is_busy=False)


def test_the_server_reads_what_the_engine_noted(pages: Pages) -> None:
    pages.engine.beat()
    pages.engine.begin_step()
    assert pages.server.pulse() == Pulse(1, 1, is_busy=True)
    pages.engine.prepare(2**63, 1)
    pages.engine.note(Activity.DECODE, [5, 2**40])
    assert pages.server.last() == LastActivity(Activity.DECODE, (5, 2**40), (2**63,), 1)
    pages.engine.begin_step()
    assert pages.server.last() == LastActivity(Activity.OTHER, (), (2**63,), 2)
    pages.engine.prepare(0, 1)
    pages.engine.rest()
    assert pages.server.last() == LastActivity(Activity.IDLE, (), (), 2)
    assert pages.server.pulse() == Pulse(1, 2, is_busy=False)


def test_more_requests_than_fit_are_cut(pages: Pages) -> None:
    pages.engine.note(Activity.DECODE, list(range(MAX_NUMBERS + 5)))
    assert pages.server.last().numbers == tuple(range(MAX_NUMBERS))


def test_a_page_full_of_rubbish_can_be_read(pages: Pages) -> None:
    """A process that overwrites its own memory may write into the page before it dies."""
    pages.engine._map[:] = b"\xff" * len(pages.engine._map)
    assert pages.server.last().activity is Activity.OTHER
    assert pages.server.pulse().is_busy
