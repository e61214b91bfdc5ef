"""The report as one HTML page, with its styles and charts inside."""

from collections.abc import Iterator, Sequence
from html import escape

from rekindle.replay.charts import N_COLOURS, Bar, Point, lines, stacked_bars
from rekindle.replay.client import Outcome
from rekindle.replay.numbers import count_text
from rekindle.replay.report import (
    ReplayRun,
    Report,
    amplifications,
    columns_of,
    in_order,
    notes_of,
    rows_of,
)

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2024; --faint: #687076; --rule: #dfe3e6;
  --prefilled: #d9480f; --cached: #8fb8de;
  --s0: #0b6bcb; --s1: #d9480f; --s2: #2b8a3e; --s3: #862e9c; --s4: #a16207; --s5: #0c8599; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181b; --ink: #e6e8ea; --faint: #9ba1a6;
  --rule: #2e3338; --prefilled: #ff922b; --cached: #3b6ea5;
  --s0: #74b3ff; --s1: #ff922b; --s2: #69db7c; --s3: #da9bf0; --s4: #e8b93c; --s5: #66d9e8; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 960px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
h3 { font-size: .95rem; font-weight: 600; margin: .8rem 0 0; overflow-wrap: anywhere; }
p, li { color: var(--faint); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem; border-bottom: 1px solid var(--rule); text-align: right; }
thead th { overflow-wrap: anywhere; vertical-align: bottom; }
tbody th { text-align: left; font-weight: 400; color: var(--faint); white-space: nowrap; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--faint); font: 11px system-ui, sans-serif; }
text.y { text-anchor: end; } text.x { text-anchor: middle; }
line.grid { stroke: var(--rule); } line { stroke-width: 1.5; }
rect.bottom { fill: var(--cached); } rect.top { fill: var(--prefilled); }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .35em 0 0; }
.legend span { margin-right: 1.2em; overflow-wrap: anywhere; }
""" + "\n".join(
    f".s{n} {{ stroke: var(--s{n}); }} circle.s{n} {{ fill: var(--s{n}); }}"
    f" .key.s{n} {{ background: var(--s{n}); }}"
    for n in range(N_COLOURS)
)


def page_of(report: Report) -> str:
    body = "\n".join(_sections(report))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Rekindle replay</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _sections(report: Report) -> Iterator[str]:
    yield "<h1>Rekindle replay</h1>"
    yield f"<p>{len(report.requests)} requests, shape {escape(report.shape)}.</p>"
    yield _table(report)
    if notes := notes_of(report):
        yield "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"
    yield "<h2>Prompt tokens of each request</h2>"
    yield (
        '<p class="legend"><span><i class="key" style="background:var(--prefilled)"></i>'
        'prefilled</span><span><i class="key" style="background:var(--cached)"></i>'
        "cached</span></p>"
    )
    yield from _prompt_charts(report)
    yield "<h2>Seconds to the first token</h2>"
    yield _legend(report.servers)
    yield lines(
        [list(_firsts(report, server)) for server in report.servers],
        title="seconds to the first token",
    )
    yield "<h2>Amplification up to each request</h2>"
    yield "<p>Tokens prefilled for each new token; 1 is the floor.</p>"
    yield _legend(report.servers)
    yield lines(
        [list(_amplified(report, server)) for server in report.servers],
        title="amplification",
        at_least=1.0,
    )


def _table(report: Report) -> str:
    columns = columns_of(report)
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title, _ in columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, cells in rows_of(columns)
    )
    return (
        f'<div class="wide"><table><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _legend(servers: Sequence[str]) -> str:
    entries = "".join(
        f'<span><i class="key s{number % N_COLOURS}"></i>{escape(server)}</span>'
        for number, server in enumerate(servers)
    )
    return f'<p class="legend">{entries}</p>'


def _prompt_charts(report: Report) -> Iterator[str]:
    highest = max(
        (bar.bottom + bar.top for server in report.servers for bar in _bars(report, server)),
        default=0,
    )
    for server in report.servers:
        yield f"<h3>{escape(server)}</h3>"
        yield stacked_bars(
            list(_bars(report, server)), highest=highest, title=f"prompt tokens at {server}"
        )


def _bars(report: Report, server: str) -> Iterator[Bar]:
    for run, outcome in _outcomes(report, server):
        counts = outcome.counts
        n_cached, n_prefilled = counts.n_cached or 0, counts.n_prefilled
        if n_prefilled is None:  # only the prompt is known
            n_prefilled = (counts.n_prompt or 0) - n_cached
        label = (
            f"{_name(report, run, outcome)}: {count_text(counts.n_cached)} cached,"
            f" {count_text(counts.n_prefilled)} prefilled"
        )
        yield Bar(label, n_cached, n_prefilled)


def _firsts(report: Report, server: str) -> Iterator[Point]:
    for run, outcome in _outcomes(report, server):
        name, first = _name(report, run, outcome), outcome.first_token_seconds
        yield Point(name if first is None else f"{name}: {first:.3f} s", first)


def _amplified(report: Report, server: str) -> Iterator[Point]:
    runs = report.runs_of(server)
    values = amplifications(runs)
    for run, outcome in _outcomes(report, server):
        name = _name(report, run, outcome)
        if outcome.index in run.counted and outcome.counts.n_prefilled is not None:
            value = next(values)
            yield Point(f"{name}: {value:.3f}", value)
        else:
            yield Point(name, None)


def _outcomes(report: Report, server: str) -> Iterator[tuple[ReplayRun, Outcome]]:
    return ((run, outcome) for run in report.runs_of(server) for outcome in in_order(run))


def _name(report: Report, run: ReplayRun, outcome: Outcome) -> str:
    name = report.requests[outcome.index].name
    if len(report.runs_of(run.server)) > 1:
        name += f" #{run.repeat}"
    return f"{name} failed: {outcome.error}" if outcome.error is not None else name
