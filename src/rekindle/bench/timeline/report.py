"""The timeline of one workload: a picture, and a table of the stages."""

from collections.abc import Sequence
from pathlib import Path

from rekindle.bench.report.tables import markdown_table
from rekindle.bench.timeline.picture import COLOURS, picture_of
from rekindle.bench.timeline.stages import Lanes, Window, lanes_of
from rekindle.observe.timeline import read_spans

STAGES = tuple(COLOURS)


def write_timeline(workload: str, spans: Path, windows: Sequence[Window], out: Path) -> list[Path]:
    """Write the picture and the table of a workload into the folder `out`."""
    lanes = lanes_of(read_spans(spans))
    windows = sorted(windows, key=lambda window: window.sent)
    title = f"{workload}: where the time goes"
    picture, table = out / f"timeline-{workload}.svg", out / f"timeline-{workload}.md"
    picture.write_text(picture_of(title, lanes, windows), "utf-8")
    table.write_text(f"# {title}\n\n{stage_table(lanes, windows)}\n", "utf-8")
    return [picture, table]


def stage_table(lanes: Lanes, windows: Sequence[Window]) -> str:
    """Return the mean milliseconds of a request in each stage, the longest stage first."""
    to_first, behind, whole = (dict.fromkeys(STAGES, 0.0) for _ in range(3))
    for window in windows:
        for column, began, ended in (
            (to_first, window.sent, window.first_token),
            (behind, window.first_token, window.ended),
        ):
            for stage, seconds in lanes.seconds(began, ended).items():
                column[stage] += seconds
                whole[stage] += seconds
    columns = (to_first, behind, whole)
    total = sum(whole.values())
    n_windows = max(len(windows), 1)  # none: all requests failed
    lines = [["ms per request", "to the first token", "behind it", "in all", "share"]]
    for stage, seconds in sorted(whole.items(), key=lambda item: -item[1]):
        if seconds:
            cells = [f"{1e3 * column[stage] / n_windows:.2f}" for column in columns]
            lines.append([stage, *cells, f"{100 * seconds / total:.1f} %"])
    totals = [f"{1e3 * sum(column.values()) / n_windows:.2f}" for column in columns]
    return markdown_table([*lines, ["all", *totals, "100 %"]])
