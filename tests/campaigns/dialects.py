"""Write calls with every published template, and read them back with the dialect chosen for it.

    python -m tests.campaigns.dialects [FOLDER ...] [--renamed SEED ...] [--verbose]
    python -m tests.campaigns.dialects --write

Without folders: the templates that `tests/support/published_templates.py` brings. One line per
template: whether its dialect is derived, written by hand or the generic one, what the template
loses, and why a dialect was not derived. `--renamed` gives all marks other names, by seed.
`--write` writes the table of docs/templates.md. Exits with 1 if a dialect is silently wrong: it
does not read what the template writes, and does not say so.
"""
# ruff: noqa: T201

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.support.call_probes import FEW_PROBES
from tests.support.published_templates import main as bring
from tests.support.published_templates import published, read_templates
from tests.support.renamed_templates import renamed
from tests.support.template_oracle import Origin, Verdict, verdict_on

DOCUMENT = Path(__file__).parents[2] / "docs" / "templates.md"
CALLING = "write calls"
TABLE_HEAD = "| template | dialect | lost by the template | why not derived |\n|---|---|---|---|\n"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--renamed", type=int, nargs="+", metavar="SEED", default=[])
    parser.add_argument("--verbose", action="store_true", help="show every wrong reading")
    parser.add_argument("--write", action="store_true", help="write the table of docs/templates.md")
    options = parser.parse_args()
    bring()
    sources = read_templates(*options.folders) if options.folders else published()
    if options.write:
        return write({name: verdict_on(source) for name, source in sources.items()})
    n_wrong = 0
    for seed in options.renamed or [None]:
        began_at = time.monotonic()
        totals: Counter[str] = Counter()
        for name, source in sources.items():
            verdict = verdict_on(source) if seed is None else verdict_on_renamed(source, seed)
            totals[outcome(verdict)] += 1
            totals[CALLING] += verdict.writes_calls
            report(name, verdict, verbose=options.verbose)
        n_wrong += totals["WRONG"]
        title = "as published" if seed is None else f"renamed with seed {seed}"
        print(f"{title}: {summary(totals)}, {time.monotonic() - began_at:.0f} s")
    return 1 if n_wrong else 0


def verdict_on_renamed(source: str, seed: int) -> Verdict:
    other = renamed(source, seed)
    return verdict_on(other.text, other.words, FEW_PROBES)


def outcome(verdict: Verdict) -> str:
    return "WRONG" if verdict.wrong else verdict.chosen.origin.value


def report(name: str, verdict: Verdict, *, verbose: bool) -> None:
    reason = f" ({verdict.chosen.reason})" if verdict.chosen.reason else ""
    lost = f" lost: {', '.join(verdict.lost)}" if verdict.lost else ""
    print(f"{outcome(verdict):8} {name}{reason}{lost}")
    shown = verdict.wrong if verbose else verdict.wrong[:1]
    for line in shown:
        print(f"         {line}")


def summary(totals: Counter[str]) -> str:
    counts = [f"{n} {key}" for key, n in totals.most_common() if key != CALLING]
    n_derived, n_calling = totals[Origin.DERIVED.value], totals[CALLING]
    return f"{', '.join(counts)}; {n_derived} of {n_calling} that write calls are derived"


def table(verdicts: Mapping[str, Verdict]) -> str:
    rows = []
    for name, verdict in sorted(verdicts.items(), key=lambda item: item[0].lower()):
        chosen = verdict.chosen
        rows.append(f"| {name} | {chosen.origin} | {', '.join(verdict.lost)} | {chosen.reason} |\n")
    return TABLE_HEAD + "".join(rows)


def write(verdicts: Mapping[str, Verdict]) -> int:
    for name, verdict in verdicts.items():
        if verdict.wrong:
            report(name, verdict, verbose=False)
            return 1
    before, _, _ = DOCUMENT.read_text("utf-8").partition(TABLE_HEAD)
    DOCUMENT.write_text(before + table(verdicts), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
