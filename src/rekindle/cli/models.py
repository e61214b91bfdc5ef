"""`rekindle models`: what the server makes of a model file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rekindle.cli.plain import count, print_json, print_pairs

if TYPE_CHECKING:  # importing the grammar engine would slow down `--help`
    from rekindle.models.dialect_check import DialectReport

app = typer.Typer(no_args_is_help=True, help="Check model files.")


@app.callback()
def models() -> None:
    """Check model files."""


@app.command()
def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A GGUF file, or a .jinja template.")
    ],
    *,
    chat_template: Annotated[
        str | None, typer.Option(metavar="T", help="Path of another template, or `chatml`.")
    ] = None,
    tool_dialect: Annotated[
        str | None, typer.Option(metavar="NAME", help="Check this dialect instead.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Say how the model's tool calls and reasoning are read, and what is lost.

    Exits with 1 if calls are served with the generic description of tools, or their grammar
    refuses what the template writes. The weights are not loaded.
    """
    from rekindle.models.dialect_check import check_dialect

    report = check_dialect(file, chat_template=chat_template, name=tool_dialect)
    choice, proof = report.choice, report.proof
    marks = choice.dialect.reasoning
    if json:
        print_json(
            {
                "template": report.template,
                "dialect": choice.dialect.name,
                "origin": choice.origin.value,
                "line": choice.line,
                "losses": list(choice.losses),
                "reasoning": [marks.opening, marks.closing] if marks else None,
                "reasoning_assumed": choice.assumes_reasoning,
                "refused_by_grammar": list(proof.refused) if proof else None,
            }
        )
    else:
        thoughts = f"between {marks.opening!r} and {marks.closing!r}" if marks else "-"
        assumed = " (assumed: the template shows none)" if choice.assumes_reasoning else ""
        print_pairs(
            {
                "template": report.template,
                "tool calls": choice.line,
                "lost": "; ".join(choice.losses) or "nothing",
                "reasoning": thoughts + assumed,
                "grammar": _grammar_line(report),
            }
        )
    if choice.describes_tools or (proof is not None and not proof.constrains):
        raise typer.Exit(1)


def _grammar_line(report: "DialectReport") -> str:
    proof = report.proof
    if proof is None:
        return "not tried: a template alone has no vocabulary"
    if not proof.n_accepted and not proof.refused:
        return "not tried: the template writes no calls"
    accepted = f"accepts {count(proof.n_accepted, 'turn')} that the template wrote"
    return f"{accepted}, refuses {', '.join(proof.refused)}" if proof.refused else accepted
