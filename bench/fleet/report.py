"""The results of a simulation as Markdown tables, a CSV file and pictures."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from operator import attrgetter
from pathlib import Path

from bench.fleet.jobs import FleetSummary, Result
from bench.fleet.run import FleetSetup
from rekindle.bench.report.bars import Chart, LogScale, Panel, svg_of
from rekindle.bench.report.plots import LOG_SCALE, amplification_text, time_text
from rekindle.bench.report.tables import markdown_table, write_csv

MOST_PANELS = 3
AMPLIFICATION = attrgetter("whole.amplification")
P50 = attrgetter("whole.first_token_p50_seconds")
P95 = attrgetter("whole.first_token_p95_seconds")
PEAK = attrgetter("whole.store_peak_gbit_per_second")
WITH, WITHOUT = "with a shared store", "without"
CSV_HEADINGS = [
    *("replicas", "policy", "store", "disturbed_by", "window"),
    *(field.name for field in fields(FleetSummary)),
]


def write_report(results: Sequence[Result], folder: Path, seed: int) -> str:
    """Write the tables, the CSV file and the pictures to `folder`. Return the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = _tables(results)
    (folder / "fleet.md").write_text(tables)
    write_csv(folder / "fleet.csv", CSV_HEADINGS, _csv_rows(results))
    for name, picture in _pictures(results, seed).items():
        (folder / name).write_text(picture)
    return tables


def _is_calm(setup: FleetSetup) -> bool:
    return setup.replicas_die_at is None and setup.store_leaves_at is None


def _tables(results: Sequence[Result]) -> str:
    calm = [result for result in results if _is_calm(result.setup)]
    parts = []
    for n_replicas in dict.fromkeys(result.setup.n_replicas for result in calm):
        chosen = [result for result in calm if result.setup.n_replicas == n_replicas]
        table = markdown_table([HEADINGS, *map(_line, chosen)])
        parts.append(f"## Replicas: {n_replicas:,}\n\n{table}")
    disturbed = [result for result in results if not _is_calm(result.setup)]
    if disturbed:
        lines = [_disturbed_line(result, results) for result in disturbed]
        n_replicas = disturbed[0].setup.n_replicas
        title = f"## Disturbed, of {n_replicas:,} replicas"
        parts.append(f"{title}\n\n{markdown_table([DISTURBED_HEADINGS, *lines])}")
    return "\n\n".join(parts) + "\n"


HEADINGS = (
    "routing",
    "store",
    "live, memory",
    "disk",
    "shared",
    "computed",
    "amplification",
    "first token p50",
    "p95",
    "busiest / mean",
    "store in GB/h",
    "out GB/h",
    "peak Gbit/s",
)
DISTURBED_HEADINGS = (
    "what happens",
    "routing",
    "store",
    "computed, 10 minutes",
    "undisturbed",
    "computed, the hour behind",
    "undisturbed",
    "first token p95, 10 minutes",
    "undisturbed",
)


def _line(result: Result) -> list[str]:
    found = result.whole
    return [
        str(result.setup.policy),
        "yes" if result.setup.has_store else "no",
        _percent(found.live_share),
        _percent(found.disk_share),
        _percent(found.shared_share),
        _percent(found.recomputed_share),
        f"{found.amplification:.2f}",
        time_text(found.first_token_p50_seconds),
        time_text(found.first_token_p95_seconds),
        f"{found.imbalance:.2f}",
        _plain(found.store_in_gb_per_hour),
        _plain(found.store_out_gb_per_hour),
        _plain(found.store_peak_gbit_per_second),
    ]


def _disturbed_line(result: Result, results: Sequence[Result]) -> list[str]:
    setup = replace(result.setup, replicas_die_at=None, store_leaves_at=None)
    calm = next(each for each in results if each.setup == setup)
    dies = result.setup.replicas_die_at is not None
    return [
        "a tenth of the replicas die" if dies else "the store is away for 10 minutes",
        str(setup.policy),
        "yes" if setup.has_store else "no",
        _percent(result.ten_minutes.recomputed_share),
        _percent(calm.ten_minutes.recomputed_share),
        _percent(result.hour.recomputed_share),
        _percent(calm.hour.recomputed_share),
        time_text(result.ten_minutes.first_token_p95_seconds),
        time_text(calm.ten_minutes.first_token_p95_seconds),
    ]


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def _csv_rows(results: Sequence[Result]) -> Iterator[list[object]]:
    for result in results:
        setup = result.setup
        about = [setup.n_replicas, setup.policy, setup.has_store, _disturbed_by(setup)]
        for window in ("whole", "ten_minutes", "hour"):
            values = asdict(getattr(result, window)).values()
            yield [*about, window, *(f"{value:.6g}" for value in values)]


def _disturbed_by(setup: FleetSetup) -> str:
    if setup.replicas_die_at is not None:
        return "replicas die"
    return "store leaves" if setup.store_leaves_at is not None else ""


def _pictures(results: Sequence[Result], seed: int) -> dict[str, str]:
    calm = [result for result in results if _is_calm(result.setup)]
    fleets = list(dict.fromkeys(result.setup.n_replicas for result in calm))
    footer = f"Simulated: python -m bench.fleet --seed {seed}"
    largest = [result for result in calm if result.setup.n_replicas == fleets[-1]]
    with_store = [result for result in calm if result.setup.has_store]
    return {
        "fleet-computed.svg": _picture(
            "Tokens computed for each new token",
            f"By routing policy and number of replicas. {LOG_SCALE}",
            footer,
            _panels(
                {
                    f"{n:,} replicas": [each for each in calm if each.setup.n_replicas == n]
                    for n in fleets[-MOST_PANELS:]
                },
                AMPLIFICATION,
                _by_store,
                amplification_text,
                lowest=1.0,
            ),
        ),
        "fleet-first-token.svg": _picture(
            f"Time to the first token, {fleets[-1]:,} replicas",
            LOG_SCALE,
            footer,
            [
                *_panels({"p50": largest}, P50, _by_store, time_text),
                *_panels({"p95": largest}, P95, _by_store, time_text),
            ],
        ),
        "fleet-store.svg": _picture(
            "What the shared store must carry",
            f"In and out together. {LOG_SCALE}",
            footer,
            [
                *_panels({"GB/hour per replica": with_store}, _traffic, _by_size, _plain),
                *_panels({"Gbit/s, busiest minute": with_store}, PEAK, _by_size, _plain),
            ],
        ),
    }


def _picture(title: str, explanation: str, footer: str, panels: Sequence[Panel]) -> str:
    keys = [key for panel in panels for key in panel.values]
    chart = Chart(
        title=title,
        explanation=explanation,
        footer=footer,
        groups=list(dict.fromkeys(group for group, _ in keys)),
        series=list(dict.fromkeys(series for _, series in keys)),
        panels=panels,
        remarks={},
    )
    return svg_of(chart)


def _panels(
    chosen: dict[str, list[Result]],
    measure: Callable[[Result], float],
    series: Callable[[Result], str],
    text: Callable[[float], str],
    *,
    lowest: float | None = None,
) -> list[Panel]:
    """Return panels with one scale."""
    by_title = {
        title: {(str(each.setup.policy), series(each)): measure(each) for each in results}
        for title, results in chosen.items()
    }
    values = [value for panel in by_title.values() for value in panel.values() if value > 0]
    scale = LogScale(lowest or min(values, default=1.0) / 2, max(values, default=1.0))
    return [Panel(title, panel, scale, text) for title, panel in by_title.items()]


def _by_store(result: Result) -> str:
    return WITH if result.setup.has_store else WITHOUT


def _by_size(result: Result) -> str:
    return f"{result.setup.n_replicas:,} replicas"


def _traffic(result: Result) -> float:
    found = result.whole
    gb_per_hour = found.store_in_gb_per_hour + found.store_out_gb_per_hour
    return gb_per_hour / result.setup.n_replicas


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
