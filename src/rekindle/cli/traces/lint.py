"""`rekindle lint`: what a client's prompts cost a server, and which text costs it."""

import json as json_text
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rekindle.cli.plain import (
    SafeConsole,
    filled_table,
    plain_console,
    print_difference,
    print_json,
    progress_bar,
)
from rekindle.errors import StartupError

if TYPE_CHECKING:  # importing llama.cpp and the wire formats would slow down `--help`
    from rekindle.lint.audit import TraceAudit
    from rekindle.lint.baseline import LintVerdict

DEFAULT_UPSTREAM = "http://127.0.0.1:8080"
DEFAULT_TOP = 10
MAX_LEFT_OUT = 0.1  # of the requests: with more, the others do not stand for the trace; picked
STDERR = 2  # its descriptor
RECORDED = "recorded"  # the name of a trace that lint records itself


def lint(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TRACE", help="Recorded requests of any API; also .gz."),
    ] = None,
    *,
    record: Annotated[
        str | None,
        typer.Option(metavar="CMD", help="Shell command to run and record instead of a TRACE."),
    ] = None,
    upstream: Annotated[
        str, typer.Option(metavar="URL", help="With --record: the server that answers.")
    ] = DEFAULT_UPSTREAM,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="With --record: keep the trace."),
    ] = None,
    max_amplification: Annotated[
        float | None,
        typer.Option(metavar="X", min=1.0, help="Fail above this. Default: 1.1, or the baseline."),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Fail if a trace costs over 2 % more than in this file."),
    ] = None,
    write_baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what the traces cost now.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="GGUF file with the tokenizer. Default: the embedded."),
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(metavar="T", help="Path of another template, or `chatml`.")
    ] = None,
    prefill_speed: Annotated[
        float | None,
        typer.Option(metavar="N", min=0.001, help="Tokens per second, for lost seconds."),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write JUnit XML as well.")
    ] = None,
    sarif: Annotated[Path | None, typer.Option(metavar="FILE", help="Write SARIF as well.")] = None,
    top: Annotated[
        int, typer.Option(metavar="N", min=1, help="Show the N most expensive faults of a trace.")
    ] = DEFAULT_TOP,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Find text in recorded prompts that makes any server prefill them again.

    Amplification is tokens to prefill / tokens that are new; 1 is the least possible.
    Exits with 1 if it is too high. No model runs.
    """
    from rekindle.lint.as_json import json_of
    from rekindle.lint.baseline import read_baseline, verdict_on
    from rekindle.lint.baseline import write_baseline as write
    from rekindle.lint.junit import junit_of
    from rekindle.lint.sarif import sarif_of

    if bool(traces) == (record is not None):
        raise StartupError("Name a TRACE, or a command with --record.")
    known = None if baseline is None else read_baseline(baseline)
    exit_code = 0
    if record is None:
        named = {path.name: path for path in traces or ()}
        if len(named) < len(traces or ()):
            raise StartupError("Two traces have the same file name: a baseline needs others.")
        audits = _audit(named, model, chat_template, prefill_speed)
    else:
        reading = (model, chat_template, prefill_speed)
        audits, exit_code = _record(record, upstream, output, reading, is_quiet=json)
        named = {RECORDED: output or Path("trace.jsonl")}
    verdicts = [verdict_on(audit, known, max_amplification) for audit in audits]
    if write_baseline is not None and not exit_code:
        write(write_baseline, audits)
    _write(junit, junit_of(verdicts))
    document = sarif_of(verdicts, {name: path.as_posix() for name, path in named.items()})
    _write(sarif, json_text.dumps(document, indent=2).encode())
    if json:
        print_json(json_of(verdicts))
    else:
        _print(plain_console(), verdicts, top)
    if exit_code:
        typer.echo(f"The command failed with exit code {exit_code}.", err=True)
    if exit_code or (write_baseline is None and not all(each.is_passed for each in verdicts)):
        raise typer.Exit(1)


def _record(
    command: str,
    upstream: str,
    output: Path | None,
    reading: tuple[str | None, str | None, float | None],
    *,
    is_quiet: bool,
) -> "tuple[list[TraceAudit], int]":
    """Run the command behind the proxy, and audit what it sent.

    `is_quiet`: stdout is for the results alone.
    """
    import asyncio
    import tempfile

    from rekindle.record.running import record_command

    with tempfile.TemporaryDirectory(prefix="rekindle-lint-") as folder:
        trace = output or Path(folder) / "trace.jsonl"
        printed = STDERR if is_quiet else None
        recorded = asyncio.run(record_command(command, upstream, trace, output=printed))
        if recorded.failure:
            raise StartupError(f"{trace} is not complete: {recorded.failure}.")
        if not recorded.n_requests:
            raise StartupError(
                f"The command (exit code {recorded.exit_code}) sent no request. It must read"
                " OPENAI_BASE_URL, ANTHROPIC_BASE_URL or another of the usual variables."
            )
        return _audit({RECORDED: trace}, *reading), recorded.exit_code


def _audit(
    traces: dict[str, Path], model: str | None, chat_template: str | None, speed: float | None
) -> "list[TraceAudit]":
    from rekindle.lint.audit import audit
    from rekindle.models.prompt_reader import prompt_reader
    from rekindle.replay.traffic import read_traffic

    audits = []
    # On stderr, because the results may go to a file.
    progress = progress_bar(SafeConsole(stderr=True, highlight=False))
    with prompt_reader(model, chat_template=chat_template) as builder, progress:
        for name, path in progress.track(traces.items(), description="Reading prompts"):
            traffic = read_traffic([path], every_format=True)
            found = audit(name, traffic.requests, builder, speed=speed, n_skipped=traffic.n_damaged)
            n_all = found.n_requests + found.n_skipped
            if found.n_left_out > MAX_LEFT_OUT * n_all:
                raise StartupError(
                    f"{path}: {found.n_left_out} of {n_all} requests have no prompt that can be"
                    " read, too many for a verdict."
                )
            audits.append(found)
    return audits


def _write(file: Path | None, content: bytes) -> None:
    if file is None:
        return
    try:
        file.write_bytes(content)
    except OSError as error:
        raise StartupError(f"{file} cannot be written: {error.strerror}.") from error


def _print(console: Console, verdicts: "Sequence[LintVerdict]", top: int) -> None:
    from rekindle.replay.numbers import decimal_text

    rows = [
        {
            "trace": verdict.audit.name,
            "requests": f"{verdict.audit.n_requests:,}",
            "unread": f"{verdict.audit.n_unread:,}" if verdict.audit.n_unread else "",
            "skipped": f"{verdict.audit.n_skipped:,}" if verdict.audit.n_skipped else "",
            "prompt": f"{verdict.audit.n_prompt:,}",
            "prefilled": f"{verdict.audit.n_prefilled:,}",
            "new": f"{verdict.audit.n_new:,}",
            "lost": f"{verdict.audit.n_lost:,}",
            "lost s": decimal_text(verdict.audit.seconds_lost, 1),
            "amplification": f"{verdict.audit.amplification:.3f}",
            "allowed": f"{verdict.allowed:.3f}",
            "verdict": "passed" if verdict.is_passed else "FAILED",
        }
        for verdict in verdicts
    ]
    words = ("trace", "verdict")
    numbers = [name for name in rows[0] if name not in words]
    console.print(filled_table(rows, numbers=numbers, optional=("unread", "skipped")))
    for verdict in verdicts:
        _print_faults(console, verdict, top)


def _print_faults(console: Console, verdict: "LintVerdict", top: int) -> None:
    from rekindle.lint.advice import advice_on, culprit_of
    from rekindle.lint.as_json import sentence_of

    faults = verdict.audit.faults
    for fault in faults[:top]:
        known = " (in the baseline)" if fault.key in verdict.known else ""
        console.print(f"\n{verdict.audit.name}: {sentence_of(fault)}{known}", soft_wrap=True)
        names = [loss.request.name for loss in fault.losses]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        culprit = culprit_of(fault.change.kind)
        console.print(
            f"  {culprit}: {', '.join(names[:3])}{more}. {advice_on(fault.change.kind)}",
            soft_wrap=True,
        )
        change = fault.change
        print_difference(console, change.before, change.expected, change.got)
    if len(faults) > top:
        console.print(f"\n{len(faults) - top} more with lower cost: --top shows them.")
