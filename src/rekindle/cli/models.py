"""`rekindle models`: what the server makes of a model file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rekindle.cli.plain import count, print_json, print_pairs
from rekindle.cli.serve import settings_with
from rekindle.config.settings import Settings

if TYPE_CHECKING:  # importing the grammar engine would slow down `--help`
    from rekindle.models.dialect_check import DialectReport
    from rekindle.models.files.inspection import ModelReport

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
    cache_type_k: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Type of the K rows, as for a server.")
    ] = None,
    cache_type_v: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Type of the V rows, as for a server.")
    ] = None,
    ctx_size: Annotated[
        str | None, typer.Option(metavar="N", help="Check whether this context fits.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Say what a model is, what fits here, and how its tool calls and reasoning are read.

    Exits with 1 if calls are served with the generic description of tools, or their grammar
    refuses what the template writes. The weights are not loaded.
    """
    from rekindle.models.dialect_check import JINJA, check_dialect

    flags = {"cache_type_k": cache_type_k, "cache_type_v": cache_type_v, "ctx_size": ctx_size}
    settings = settings_with({name: text for name, text in flags.items() if text}, None).settings
    model = None if file.suffix == JINJA else _inspect(file, settings)
    report = check_dialect(file, chat_template=chat_template, name=tool_dialect)
    choice, proof = report.choice, report.proof
    if json:
        print_json({"model": _model_json(model) if model else None, **_dialect_json(report)})
    else:
        print_pairs({**(_model_lines(model) if model else {}), **_dialect_lines(report)})
    if choice.describes_tools or (proof is not None and not proof.constrains):
        raise typer.Exit(1)


def _inspect(file: Path, settings: Settings) -> "ModelReport":
    from rekindle.models.files.inspection import inspect_model
    from rekindle.models.stores import cache_memory_bytes

    reserved = cache_memory_bytes(settings.cache)
    return inspect_model(file, settings.engine, settings.placement, reserved_bytes=reserved)


def _model_json(model: "ModelReport") -> dict[str, object]:
    choice, needs = model.fitted.choice, model.fitted.needs
    return {
        "files": model.files,
        "size_bytes": model.size_bytes,
        "architecture": model.architecture,
        "quantization": model.quantization,
        "class": model.model_class.value,
        "experts": model.has_experts,
        "n_ctx_train": model.n_ctx_train,
        "n_vocab": model.n_vocab,
        "cache_type_k": model.type_k,
        "cache_type_v": model.type_v,
        "bytes_per_10k_tokens": 10_000 * model.row_bytes,
        "checkpoint_bytes": model.checkpoint_bytes,
        "fits": {
            "fits": model.fitted.fits,
            "n_ctx": choice.n_ctx,
            "gpu_layers": choice.gpu_layers,
            "n_cpu_moe": choice.n_cpu_moe,
            "host_bytes": needs.host,
            "host_free_bytes": model.memory.host,
            "gpu_bytes": needs.gpu_bytes(model.memory),
            "gpu_free_bytes": list(model.memory.gpus),
        },
        "fim": model.fim,
        "fills_in": model.can_fill_in,
        "generates": model.can_generate,
        "embeds_with": model.embeds_with,
        "reranks": model.can_rerank,
    }


def _model_lines(model: "ModelReport") -> dict[str, str]:
    named = [each for each in (model.architecture, model.size_label, model.quantization) if each]
    kind = model.model_class.value.replace("_", " ")
    rows = (
        f"{_size(10_000 * model.row_bytes)} for 10,000 tokens (K {model.type_k}, V {model.type_v})"
    )
    if model.checkpoint_bytes:
        rows += f", and {_size(model.checkpoint_bytes)} at each checkpoint"
    return {
        "model": f"{' '.join(named)}, {_size(model.size_bytes)} of weights",
        "class": f"{kind}, with experts" if model.has_experts else kind,
        "context": f"trained with {model.n_ctx_train:,} tokens",
        "rows": rows,
        "fits here": _fit_line(model),
        "replies": "yes" if model.can_generate else "no: this is not a decoder-only model",
        "filling in": f"yes: {_fim_line(model)}" if model.can_fill_in else "no: no FIM tokens",
        "embeddings": f"yes, pooled by {model.embeds_with}" if model.embeds_with else "no",
        "reranking": "yes" if model.can_rerank else "no: the file has no ranking head",
    }


def _fim_line(model: "ModelReport") -> str:
    return ", ".join(f"{name} {text}" for name, text in model.fim.items())


def _fit_line(model: "ModelReport") -> str:
    choice, needs, memory = model.fitted.choice, model.fitted.needs, model.memory
    takes = f"{_size(needs.host)} of {_size(memory.host)} on the host"
    if memory.gpus:
        takes += f", {_size(needs.gpu_bytes(memory))} of {_size(sum(memory.gpus))} on the GPU"
        takes += f" with {choice.gpu_layers} of {model.n_layers + 1} layers there"
        if choice.n_cpu_moe:
            takes += f", experts of {choice.n_cpu_moe} layers on the host"
    verdict = "yes" if model.fitted.fits else "no"
    return f"{verdict}: a context of {choice.n_ctx:,} tokens takes {takes}"


def _size(n_bytes: int) -> str:
    for unit, length in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes >= length:
            return f"{n_bytes / length:.3g} {unit}"
    return f"{n_bytes} bytes"


def _dialect_json(report: "DialectReport") -> dict[str, object]:
    choice, proof = report.choice, report.proof
    marks = choice.dialect.reasoning
    return {
        "template": report.template,
        "dialect": choice.dialect.name,
        "origin": choice.origin.value,
        "line": choice.line,
        "losses": list(choice.losses),
        "reasoning": [marks.opening, marks.closing] if marks else None,
        "reasoning_assumed": choice.assumes_reasoning,
        "refused_by_grammar": list(proof.refused) if proof else None,
    }


def _dialect_lines(report: "DialectReport") -> dict[str, str]:
    choice = report.choice
    marks = choice.dialect.reasoning
    thoughts = f"between {marks.opening!r} and {marks.closing!r}" if marks else "-"
    assumed = " (assumed: the template shows none)" if choice.assumes_reasoning else ""
    return {
        "template": report.template,
        "tool calls": choice.line,
        "lost": "; ".join(choice.losses) or "nothing",
        "reasoning": thoughts + assumed,
        "grammar": _grammar_line(report),
    }


def _grammar_line(report: "DialectReport") -> str:
    proof = report.proof
    if proof is None:
        return "not tried: a template alone has no vocabulary"
    if not proof.n_accepted and not proof.refused:
        return "not tried: the template writes no calls"
    accepted = f"accepts {count(proof.n_accepted, 'turn')} that the template wrote"
    return f"{accepted}, refuses {', '.join(proof.refused)}" if proof.refused else accepted
