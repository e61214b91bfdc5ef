"""`WriteBehind`: bounds, retries, its one warning, and its end."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rekindle.errors import TierFailed
from rekindle.write_behind import WriteBehind

SECONDS = 10.0  # enough for a busy machine


class Disk:
    """Collects batches. While `is_held`, a write waits; `errors` are raised in turn."""

    def __init__(self) -> None:
        self.batches: list[dict[str, int]] = []
        self.errors: list[Exception] = []
        self.is_free = threading.Event()
        self.is_free.set()
        self.was_asked = threading.Event()

    def write(self, batch: dict[str, int]) -> None:
        self.was_asked.set()
        assert self.is_free.wait(SECONDS)
        if self.errors:
            raise self.errors.pop(0)
        self.batches.append(batch)

    @contextmanager
    def held(self, writer: "WriteBehind[str, int]") -> Iterator[None]:
        """Keep the writer busy with one change."""
        self.is_free.clear()
        self.was_asked.clear()
        writer.put("busy", 0)
        assert self.was_asked.wait(SECONDS)
        yield
        self.is_free.set()


@pytest.fixture
def disk() -> Disk:
    return Disk()


def test_changes_that_arrive_during_a_write_are_merged_and_written_together(disk: Disk) -> None:
    writer = WriteBehind(
        "test", disk.write, retry_seconds=1, merge=lambda before, new: before + new
    )
    with disk.held(writer):
        writer.put_all({"a": 1, "b": 5})
        writer.put("a", 2)
        assert (writer.peek("a"), writer.peek("busy"), writer.peek("c")) == (3, 0, None)
        assert writer.discard("b") == 5
    assert writer.flush(SECONDS)
    assert disk.batches == [{"busy": 0}, {"a": 3}]
    assert writer.close(SECONDS)


def test_a_change_that_its_write_has_settled_is_not_in_the_queue_any_more() -> None:
    left: list[list[str]] = []

    def write(batch: dict[str, int]) -> None:
        writer.settle(batch)
        left.append(writer.unwritten())

    writer = WriteBehind("test", write, retry_seconds=1)
    writer.put("a", 1)
    assert writer.close(SECONDS)
    assert left == [[]]


def test_a_change_that_is_replaced_while_it_is_written_is_written_again(disk: Disk) -> None:
    writer = WriteBehind("test", disk.write, retry_seconds=1)
    with disk.held(writer):
        writer.put("busy", 1)
    assert writer.close(SECONDS)
    assert disk.batches == [{"busy": 0}, {"busy": 1}]


def test_beyond_the_bounds_the_oldest_changes_are_dropped(disk: Disk) -> None:
    dropped: list[str] = []
    writer = WriteBehind(
        "test",
        disk.write,
        retry_seconds=1,
        max_batch=1,
        max_items=3,
        max_bytes=10,
        size_of=lambda value: value,
        on_dropped=dropped.append,
    )
    with disk.held(writer):
        writer.put_all({"a": 1, "b": 2, "c": 4, "d": 5})
    assert writer.close(SECONDS)
    assert disk.batches == [{"busy": 0}, {"c": 4}, {"d": 5}]
    assert dropped == ["busy", "a", "b"]


def test_a_failed_write_is_retried_and_logged_once(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    disk.errors = [TierFailed("full"), OSError("still full")]
    writer = WriteBehind("test", disk.write, retry_seconds=0.01)
    writer.put("a", 1)
    assert writer.flush(SECONDS)
    assert disk.batches == [{"a": 1}]
    messages = [record.message for record in caplog.records]
    assert messages == ["test: storage failing, continuing in memory: full", "test: storage works"]
    assert writer.close(SECONDS)


def test_a_failed_write_without_retries_is_dropped(disk: Disk) -> None:
    dropped: list[str] = []
    disk.errors = [OSError("full")]
    writer = WriteBehind(
        "test", disk.write, retry_seconds=None, max_batch=1, on_dropped=dropped.append
    )
    writer.put_all({"a": 1, "b": 2})
    assert writer.close(SECONDS)
    assert (dropped, disk.batches) == (["a"], [{"b": 2}])


def test_an_unexpected_error_drops_its_batch_and_shows_where_it_was_raised(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.errors = [ZeroDivisionError("a mistake")]
    writer = WriteBehind("test", disk.write, retry_seconds=60)
    writer.put("a", 1)
    assert writer.flush(SECONDS)
    writer.put("b", 2)
    assert writer.close(SECONDS)
    assert disk.batches == [{"b": 2}]
    assert "Traceback" in caplog.text


def test_nothing_is_written_while_the_store_is_not_ready(disk: Disk) -> None:
    ready = threading.Event()
    writer = WriteBehind("test", disk.write, retry_seconds=None, is_ready=ready.is_set)
    writer.put("a", 1)
    assert not writer.flush(SECONDS)  # at once
    assert disk.batches == []
    ready.set()
    writer.wake()
    assert writer.flush(SECONDS)
    assert disk.batches == [{"a": 1}]
    assert writer.close(SECONDS)


def test_closing_tries_once_more_although_a_retry_is_not_due(disk: Disk) -> None:
    disk.errors = [TierFailed("full")]
    writer = WriteBehind("test", disk.write, retry_seconds=1000)
    writer.put("a", 1)
    assert not writer.flush(0.05)
    assert writer.close(SECONDS)
    assert disk.batches == [{"a": 1}]


def test_closing_does_not_wait_for_a_disk_that_hangs(disk: Disk) -> None:
    writer = WriteBehind("test", disk.write, retry_seconds=1)
    with disk.held(writer):
        assert not writer.close(0.01)
    assert writer.close(SECONDS)
