"""Where the time of a request goes."""

import json
import threading
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rekindle.bench.timeline.picture import CLASSES, MAX_REQUESTS, picture_of
from rekindle.bench.timeline.report import stage_table, write_timeline
from rekindle.bench.timeline.stages import (
    BETWEEN,
    ELSEWHERE,
    STEP,
    WAITING,
    Lanes,
    Segment,
    Window,
    lanes_of,
    segments_of,
)
from rekindle.observe import timeline
from rekindle.observe.timeline import (
    ENGINE_PROBES,
    SERVER_PROBES,
    Probe,
    StageSpan,
    install,
    read_spans,
)

PROBES = (*SERVER_PROBES, *ENGINE_PROBES)
MODULE = __name__


def span(stage: str, began: float, ended: float, n_tokens: int = 0) -> StageSpan:
    return StageSpan(stage, began, ended, "t", n_tokens)


def test_a_moment_belongs_to_the_innermost_stage() -> None:
    spans = [span(STEP, 0, 10), span("plan", 1, 2), span("batch", 2, 6, 512), span("a", 3, 4)]
    assert list(segments_of(spans)) == [
        Segment(BETWEEN, 0, 1),
        Segment("plan", 1, 2),
        Segment("batch", 2, 3, 512),
        Segment("a", 3, 4),
        Segment("batch", 4, 6, 512),
        Segment(BETWEEN, 6, 10),
    ]


def test_spans_that_follow_each_other_leave_a_gap() -> None:
    assert list(segments_of([span("a", 0, 1), span("b", 3, 4)])) == [
        Segment("a", 0, 1),
        Segment("b", 3, 4),
    ]


def test_the_stages_of_a_request_are_its_whole_time() -> None:
    lanes = Lanes(
        server=[Segment("render", 0, 2), Segment("render", 5, 9)],
        engine=[Segment("batch", 1, 4), Segment("sample", 6, 7)],
        stores=[Segment("write", 0, 9)],
    )
    seconds = lanes.seconds(0.5, 10)
    assert seconds == {"render": 0.5 + 1 + 2, "batch": 3, "sample": 1, ELSEWHERE: 1 + 1}
    assert sum(seconds.values()) == 9.5


def test_an_engine_that_waits_leaves_the_time_to_the_server() -> None:
    lanes = lanes_of(
        {
            "server-1": [span("render", 0, 2)],
            "engine-2": [span(WAITING, 0, 3), span(STEP, 3, 4), StageSpan("write", 0, 5, "disk")],
        }
    )
    assert lanes.seconds(0, 4) == {"render": 2, ELSEWHERE: 1, BETWEEN: 1}
    assert [each.stage for each in lanes.stores] == ["write"]


def test_the_table_has_the_longest_stage_first_and_the_sums() -> None:
    lanes = Lanes(server=[], engine=[Segment("batch", 0, 3), Segment("sample", 3, 4)], stores=[])
    table = stage_table(lanes, [Window("a", 0, 2, 4)])
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == [
        "| batch",
        "| sample",
        "| all",
    ]
    assert "| all | 2000.00 | 2000.00 | 4000.00 | 100 % |" in table


def test_the_picture_shows_some_of_many_requests(tmp_path: Path) -> None:
    spans = [span(STEP, -1, 0), *(span("batch", n, n + 0.5, 64) for n in range(40))]
    lines = [f"{json.dumps(each)}\n" for each in spans]
    (tmp_path / "engine-1.jsonl").write_text("".join([*lines, '["cut']))
    windows = [Window(f"request {n} <&>", n, n + 0.25, n + 0.5) for n in range(40)]
    picture, table = write_timeline("w", tmp_path, windows, tmp_path)
    svg = ElementTree.fromstring(picture.read_text("utf-8"))
    names = [text for text in svg.itertext() if "first token 250 ms" in text]
    assert len(names) == MAX_REQUESTS
    assert "batch 500.00 ms, 64 tokens" in list(svg.itertext())
    assert "| batch | 250.00 | 250.00 | 500.00 | 100.0 % |" in table.read_text("utf-8")


def test_a_picture_without_requests_is_a_picture() -> None:
    assert ElementTree.fromstring(picture_of("t", Lanes([], [], []), [])) is not None


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: f"{probe.module}:{probe.name}")
def test_each_probe_names_a_function_and_a_stage_with_a_colour(probe: Probe) -> None:
    owner, name = timeline._owner_of(probe)
    assert callable(getattr(owner, name))
    assert probe.stage in CLASSES or probe.stage in (STEP, WAITING)


def work(tokens: list[int]) -> int:
    """Stand for a stage."""
    return len(tokens)


def fail() -> None:
    raise ValueError("no")


def test_calls_are_noted_with_their_thread_also_when_they_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("work", "fail"):
        monkeypatch.setitem(globals(), name, globals()[name])  # back to what it was, behind this
    install(tmp_path, "p", (Probe("working", MODULE, "work", 0), Probe("failing", MODULE, "fail")))
    assert work([1, 2, 3]) == 3
    with pytest.raises(ValueError, match="no"):
        fail()
    thread = threading.Thread(target=lambda: work([]), name="another")
    thread.start()
    thread.join()
    [spans] = read_spans(tmp_path).values()
    assert [(each.stage, each.thread, each.n_tokens) for each in spans] == [
        ("working", "MainThread", 3),
        ("failing", "MainThread", 0),
        ("working", "another", 0),
    ]
    assert all(each.began <= each.ended for each in spans)


def test_threads_of_the_server_that_run_side_by_side_count_once() -> None:
    lanes = lanes_of({"server-1": [span("render", 0, 10), StageSpan("read body", 2, 12, "other")]})
    assert lanes.seconds(0, 15) == {"render": 10, "read body": 2, ELSEWHERE: 3}
    assert lanes.seconds(11, 12) == {"read body": 1}


def test_a_table_without_requests_is_a_table() -> None:
    assert "all" in stage_table(lanes_of({}), [])
