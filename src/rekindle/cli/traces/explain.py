"""`rekindle explain`: where prompts diverged from cached ones, and what that cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rekindle.cli.plain import (
    count,
    filled_table,
    plain_console,
    print_difference,
    print_json,
    span,
)
from rekindle.cli.remote import client_of

if TYPE_CHECKING:  # importing httpx and the wire formats would slow down `--help`
    from rekindle.explain.findings import Findings, MissGroup
    from rekindle.explain.lookups import LookedUp

DEFAULT_TOP = 10
LOOKUP_SECONDS = 30.0  # for one lookup; picked


def explain(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", help="A server's trace; with --url, requests of any API. Also .gz."
        ),
    ],
    *,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Server that looks the requests up in its cache."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help="Key to send.")] = None,
    top: Annotated[
        int, typer.Option(metavar="N", min=1, help="Show the N most expensive misses.")
    ] = DEFAULT_TOP,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show where prompts diverged from the cache: the message, the change, and the cost.

    `rekindle serve --trace FILE` writes a trace.
    """
    if url is None:
        _explain_trace(files, top, json=json)
    else:
        _explain_requests(files, url, api_key, json=json)


def _explain_trace(files: list[Path], top: int, *, json: bool) -> None:
    from rekindle.explain.as_json import json_of
    from rekindle.explain.findings import findings_of
    from rekindle.explain.trace_file import read_trace

    trace = read_trace(files)
    findings = findings_of(trace.replies)
    if json:
        print_json(json_of(findings, trace.n_skipped))
        return
    console = plain_console()
    _print_summary(console, findings, trace.n_skipped)
    _print_volatile(console, findings, top)
    _print_groups(console, findings.groups[:top], n_more=len(findings.groups) - top)


def _explain_requests(files: list[Path], url: str, api_key: str | None, *, json: bool) -> None:
    from rekindle.explain.as_json import json_of_lookups
    from rekindle.explain.lookups import look_up_all
    from rekindle.replay.traffic import read_traffic

    traffic = read_traffic(files)
    with client_of(url, api_key, read_seconds=LOOKUP_SECONDS) as http:
        lookups = list(look_up_all(http, traffic))
    if json:
        print_json(json_of_lookups(lookups))
    else:
        _print_lookups(plain_console(), lookups)


def _print_summary(console: Console, findings: "Findings", n_skipped: int) -> None:
    share = findings.n_cached / findings.n_prompt if findings.n_prompt else 0.0
    console.print(
        f"{findings.n_replies:,} replies in {span(findings.seconds)}:"
        f" {findings.n_prompt:,} prompt tokens, {share:.1%} cached,"
        f" {findings.n_prefilled:,} prefilled, {findings.n_recomputed:,} of them twice."
    )
    reasons = sorted(findings.reasons.items(), key=lambda each: -each[1])
    told = ", ".join(f"{n} x {reason.value}" for reason, n in reasons)
    console.print(f"{findings.n_lost:,} tokens lost ({told})." if told else "No misses.")
    if n_skipped:
        console.print(f"{n_skipped:,} lines were skipped: they are not lines of a trace.")


def _print_volatile(console: Console, findings: "Findings", top: int) -> None:
    from rekindle.explain.advice import advice_on

    if not findings.volatile:
        return
    console.print("\nText that keeps changing:", style="bold")
    for found in findings.volatile[:top]:
        console.print(f"  {advice_on(found)}", soft_wrap=True)
        console.print(
            f"    {found.cost.n_times} times in {count(found.n_sessions, 'session')},"
            f" {found.cost.tokens:,} tokens in all, {found.cost.tokens_per_hour:,.0f} an hour;"
            f" last {', '.join(found.values)}",
            style="dim",
            soft_wrap=True,
        )


def _print_groups(console: Console, groups: "Sequence[MissGroup]", *, n_more: int) -> None:
    from rekindle.explain.advice import advice_on, place_of

    if not groups:
        return
    rows = [
        {
            "#": str(number),
            "tokens": f"{group.cost.tokens:,}",
            "times": str(group.cost.n_times),
            "per hour": f"{group.cost.tokens_per_hour:,.0f}",
            "session": group.session,
            "reason": group.miss.reason.value,
            "where": place_of(group.miss),
            "what": group.volatile.kind if group.volatile else "",
        }
        for number, group in enumerate(groups, start=1)
    ]
    console.print()
    console.print(filled_table(rows, numbers=("#", "tokens", "times", "per hour")))
    for number, group in enumerate(groups, start=1):
        console.print(f"\n#{number} {advice_on(group)}", soft_wrap=True)
        print_difference(console, group.miss.before, group.miss.expected, group.miss.got)
    if n_more > 0:
        console.print(f"\n{n_more} more with lower cost: --top shows them.")


def _print_lookups(console: Console, lookups: "Sequence[LookedUp]") -> None:
    from rekindle.explain.advice import advice_for, place_of

    for each in lookups:
        n_cached = each.n_prompt - each.n_prefilled
        console.print(
            f"{each.name}: {n_cached:,} of {each.n_prompt:,} prompt tokens would be found.",
            soft_wrap=True,
        )
        if each.miss is None:
            continue
        where = f" in {place_of(each.miss)}" if place_of(each.miss) else ""
        console.print(
            f"  {each.miss.reason.value}{where}, {each.miss.tokens_lost:,} tokens lost."
            f" {advice_for(each.miss)}",
            soft_wrap=True,
        )
        print_difference(console, each.miss.before, each.miss.expected, each.miss.got)
