"""The pictures of a run: their numbers, titles and explanations."""

from collections.abc import Mapping, Sequence
from math import floor, log10

from rekindle.bench.report.bars import Chart, LinearScale, LogScale, Panel, svg_of
from rekindle.bench.report.results import Run
from rekindle.bench.report.summary import (
    Measure,
    failures_of,
    medians,
    n_rounds_of,
    servers_of,
    workloads_of,
)

FLOOR_IS = "1x is the floor: only tokens that no request had sent or received before."
LOG_SCALE = "Log scale, shorter is better."
P50: dict[str, Measure] = {"p50": lambda row: row.first_token_p50_seconds}
P95: dict[str, Measure] = {"p95": lambda row: row.first_token_p95_seconds}


def story(run: Run) -> str:
    """Draw the main picture: tokens computed again, and the time to the first token."""
    panels = [_amplification_panel(run), *_first_token_panels(run, P50)]
    return _drawn(run, story_title(run), f"{FLOOR_IS} {LOG_SCALE}", panels)


def amplification(run: Run) -> str:
    title = "Tokens computed for each new token"
    return _drawn(run, title, f"{FLOOR_IS} {LOG_SCALE}", [_amplification_panel(run)])


def first_token(run: Run) -> str:
    panels = _first_token_panels(run, P50 | P95)
    return _drawn(run, "Time to the first token of a reply", LOG_SCALE, panels)


def total_time(run: Run) -> str:
    values = medians(run, lambda row: row.total_seconds)
    scale = LinearScale(max(values.values(), default=0.0))
    panel = Panel("Time of all requests", values, scale, time_text)
    return _drawn(run, "Total time of each workload", "Shorter is better.", [panel])


def story_title(run: Run) -> str:
    """Return a title that holds for any numbers: it names the worst workload of each side."""
    ours, *peers = servers_of(run)
    worst: dict[str, float] = {}
    for (_, server), value in medians(run, lambda row: row.amplification).items():
        worst[server] = max(worst.get(server, 0.0), value)
    if ours not in worst:
        return "Tokens computed for each new token, and the time to the first token"
    said = f"For each new token, {ours} computes at most {worst[ours]:.2f}"
    others = [peer for peer in peers if peer in worst]
    if not others:
        return said
    peer = max(others, key=lambda name: worst[name])
    return f"{said}, {peer} up to {amplification_text(worst[peer]).removesuffix('x')}"


def amplification_text(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


def time_text(seconds: float) -> str:
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def _drawn(run: Run, title: str, explanation: str, panels: Sequence[Panel]) -> str:
    failed = failures_of(run)
    chart = Chart(
        title=title,
        explanation=explanation,
        footer=_footer(run),
        groups=workloads_of(run),
        series=servers_of(run),
        panels=panels,
        remarks={key: f"{each.n_failed} failed" for key, each in failed.items()},
    )
    return svg_of(chart)


def _amplification_panel(run: Run) -> Panel:
    values = medians(run, lambda row: row.amplification)
    scale = LogScale(1.0, max(values.values(), default=1.0))
    return Panel("Tokens computed / new tokens", values, scale, amplification_text)


def _first_token_panels(run: Run, measures: Mapping[str, Measure]) -> list[Panel]:
    """Return panels with one scale."""
    by_title = {title: medians(run, measure) for title, measure in measures.items()}
    seconds = [value for values in by_title.values() for value in values.values() if value > 0]
    lowest = 10.0 ** floor(log10(min(seconds, default=1.0)))
    scale = LogScale(lowest, max(seconds, default=1.0))
    return [
        Panel(f"Time to first token, {title}", values, scale, time_text)
        for title, values in by_title.items()
    ]


def _footer(run: Run) -> str:
    parts = [run.machine, run.model, f"commit {run.commit}" if run.commit else ""]
    if (n_rounds := n_rounds_of(run)) > 1:
        parts.append(f"medians of {n_rounds} rounds")
    return "; ".join(part for part in parts if part)
