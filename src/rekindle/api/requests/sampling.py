"""Sampling fields of llama-server, and their conversion to `Sampling`.

Names, defaults and bounds are llama-server's. It moves a value beyond a soft bound to the bound
(`temperature` -1 is 0), so we do too.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Strict, TypeAdapter, ValidationError, WithJsonSchema

from rekindle.api.body import SHOULD_BE, Ignored, Items, Refused, WireModel, fault
from rekindle.api.requests.adapters import AdapterScale
from rekindle.api.requests.json_values import Int64, JsonObject
from rekindle.api.requests.limits import MAX_BIASES, MAX_OPTIONS
from rekindle.generation.request import (
    Grammar,
    GrammarKind,
    SamplerName,
    Sampling,
)
from rekindle.generation.tokenizer import Tokenizer

N_SEEDS = 2**32 - 1  # llama.cpp's seeds are 32 bits wide, and the last one means "random"
RANDOM_SEED = -1
MOST = 1e30  # of a setting or a bias; larger ones mean the same; picked
MAX_N_PROBS = 100  # picked; each is sent with every token
MAX_BREAKER_CHARS = 40  # llama.cpp ignores the rest
MAX_BREAKERS = 32  # each is looked for in the whole vocabulary; picked
MAX_BIASED_CHARS = 2**11  # of all texts in `logit_bias`, which are tokenised; picked

Bias = float | Literal[False]
BiasPair = Annotated[tuple[Int64 | str, Bias], Strict(strict=False)]
BIAS: TypeAdapter[Bias] = TypeAdapter(Bias)
_TOKEN_ID = re.compile("-?[0-9]+")
Count = Annotated[Int64, Field(ge=0)]
Breaker = Annotated[str, Field(min_length=1)]
JsonSchema = JsonObject | bool


def _check_biases(biases: dict[str, Any]) -> dict[str, Any]:
    """Raise InvalidRequest for the first wrong bias. Pydantic would list all of them."""
    for key, bias in biases.items():
        try:
            BIAS.validate_python(bias, strict=True)
        except ValidationError as error:
            wanted = " or ".join(each["msg"].removeprefix(SHOULD_BE) for each in error.errors())
            raise fault(f"logit_bias.{key}", f" should be {wanted}.") from None
    return biases


Biases = Annotated[
    dict[str, Any],
    Field(max_length=MAX_BIASES),
    AfterValidator(_check_biases),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_BIASES,
            "additionalProperties": BIAS.json_schema(),
        }
    ),
]


class SamplingFields(WireModel):
    """Fields of every endpoint that takes llama-server's sampling settings."""

    temperature: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    top_k: Int64 | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repeat_penalty: Annotated[float, Field(gt=0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    repeat_last_n: Annotated[Int64, Field(ge=-1)] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Count | None = None
    dry_penalty_last_n: Annotated[Int64, Field(ge=-1)] | None = None
    dry_sequence_breakers: (
        Annotated[list[Breaker], Field(fail_fast=True, min_length=1, max_length=MAX_BREAKERS)]
        | None
    ) = None
    mirostat: Int64 | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    adaptive_target: Annotated[float, Field(le=1)] | None = None
    adaptive_decay: Annotated[float, Field(ge=0, le=0.99)] | None = None
    samplers: (
        Annotated[str, Field(max_length=MAX_OPTIONS)]
        | Annotated[list[str], Field(fail_fast=True, max_length=MAX_OPTIONS)]
        | None
    ) = None
    min_keep: Count | None = None
    seed: Annotated[int, Field(ge=-(2**128), le=2**128)] | None = None
    logit_bias: (
        Biases | Annotated[list[BiasPair], Field(fail_fast=True, max_length=MAX_BIASES)] | None
    ) = None
    ignore_eos: bool | None = None
    lora: Annotated[Items[AdapterScale], Field(max_length=MAX_OPTIONS)] | None = None

    grammar: str | None = None
    json_schema: JsonSchema | None = None
    grammar_lazy: Annotated[Any, Refused("A grammar applies from the first token.")] = None
    grammar_triggers: Annotated[Any, Refused("A grammar applies from the first token.")] = None

    n_probs: Annotated[Int64, Field(ge=0, le=MAX_N_PROBS)] | None = None
    post_sampling_probs: bool | None = None
    backend_sampling: Annotated[bool | None, Ignored()] = None


# Requests and `Sampling` name these fields alike. Wire formats other than llama-server's have few.
SHARED_FIELDS = frozenset(
    {
        "temperature",
        "dynatemp_range",
        "dynatemp_exponent",
        "top_k",
        "top_p",
        "min_p",
        "top_n_sigma",
        "typical_p",
        "xtc_probability",
        "xtc_threshold",
        "repeat_penalty",
        "repeat_last_n",
        "frequency_penalty",
        "presence_penalty",
        "dry_multiplier",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "mirostat",
        "mirostat_tau",
        "mirostat_eta",
        "adaptive_target",
        "adaptive_decay",
        "min_keep",
        "ignore_eos",
        "post_sampling_probs",
    }
)
ALIASES = {
    "nucleus": SamplerName.TOP_P,
    "temp": SamplerName.TEMPERATURE,
    "typ": SamplerName.TYPICAL_P,
}
LETTERS = {
    "d": SamplerName.DRY,
    "k": SamplerName.TOP_K,
    "y": SamplerName.TYPICAL_P,
    "p": SamplerName.TOP_P,
    "s": SamplerName.TOP_N_SIGMA,
    "m": SamplerName.MIN_P,
    "t": SamplerName.TEMPERATURE,
    "x": SamplerName.XTC,
    "i": SamplerName.INFILL,
    "e": SamplerName.PENALTIES,
    "a": SamplerName.ADAPTIVE_P,
}


def sampling_of(body: WireModel, defaults: Sampling, grammar: Grammar | None) -> Sampling:
    """Replace the defaults that the request sets by fields of the same name."""
    names = SHARED_FIELDS & type(body).model_fields.keys()
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    return _bounded(replace(defaults, **given, grammar=grammar), defaults)


def llama_sampling_of(
    body: SamplingFields, defaults: Sampling, tokenizer: Tokenizer, grammar: Grammar | None
) -> Sampling:
    """Replace the defaults that the request sets. `grammar` is that of another field, if any."""
    sampling = sampling_of(body, defaults, grammar or grammar_of(body))
    if body.repetition_penalty is not None and body.repeat_penalty is None:
        sampling = replace(sampling, repeat_penalty=body.repetition_penalty)
    if body.dry_sequence_breakers is not None:
        breakers = tuple(each[:MAX_BREAKER_CHARS] for each in body.dry_sequence_breakers)
        sampling = replace(sampling, dry_sequence_breakers=breakers)
    if body.samplers is not None:
        sampling = replace(sampling, samplers=tuple(dict.fromkeys(sampler_names(body.samplers))))
    sampling = seeded(sampling, None if body.seed == RANDOM_SEED else body.seed)
    return replace(
        sampling,
        logit_bias=_logit_bias(body, tokenizer) or defaults.logit_bias,
    )


def seeded(sampling: Sampling, seed: int | None) -> Sampling:
    """Set the seed, which may be any whole number. None: leave the one that is set."""
    return sampling if seed is None else replace(sampling, seed=seed % N_SEEDS)


def sampler_names(samplers: str | list[str]) -> Iterator[SamplerName]:
    """Yield the samplers of a list of names, or of a string of letters. Others are skipped."""
    if isinstance(samplers, str):
        yield from (LETTERS[letter] for letter in samplers if letter in LETTERS)
        return
    by_name = {_plain(each): each for each in SamplerName} | ALIASES
    for name in samplers:
        if found := by_name.get(_plain(name)):
            yield found


def grammar_of(body: SamplingFields) -> Grammar | None:
    """Return the grammar of `grammar` or `json_schema`. As in llama-server, `grammar` wins."""
    if body.grammar:
        is_lark = body.grammar.startswith("%llguidance")  # as in llama-server
        kind = GrammarKind.LARK if is_lark else GrammarKind.GBNF
        return Grammar(kind, body.grammar, field="grammar")
    if body.json_schema is None or "grammar" in body.model_fields_set:
        return None
    schema = {"type": "object"} if body.json_schema == {} else body.json_schema
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), field="json_schema")


def _plain(name: str) -> str:
    """Return the name as llama-server compares it: `Top-K`, `top_k` and `topk` are one."""
    return name.lower().replace("-", "").replace("_", "")


def _bounded(sampling: Sampling, defaults: Sampling) -> Sampling:
    """Move values to llama-server's bounds, and huge ones into the range of a 32-bit float."""
    huge: dict[str, Any] = {
        field.name: math.copysign(MOST, value)
        for field in fields(sampling)
        if isinstance(value := getattr(sampling, field.name), float) and abs(value) > MOST
    }
    sampling = replace(sampling, **huge)
    return replace(
        sampling,
        temperature=max(sampling.temperature, 0.0),
        top_k=max(sampling.top_k, 0),
        top_p=min(max(sampling.top_p, 0.0), 1.0),
        min_p=min(max(sampling.min_p, 0.0), 1.0),
        xtc_probability=min(max(sampling.xtc_probability, 0.0), 1.0),
        xtc_threshold=min(max(sampling.xtc_threshold, 0.0), 1.0),
        dry_base=sampling.dry_base if sampling.dry_base >= 1.0 else defaults.dry_base,
        mirostat=min(max(sampling.mirostat, 0), 2),
    )


def _logit_bias(body: SamplingFields, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Return the bias of each token: the sum, where several entries name it."""
    found: dict[int, float] = {}
    n_chars = 0
    for key, token, bias in _bias_entries(body):
        if isinstance(token, str):
            n_chars += len(token)
            if n_chars > MAX_BIASED_CHARS:
                raise fault(
                    "logit_bias", f" should have at most {MAX_BIASED_CHARS} characters of text."
                )
            tokens = tokenizer.tokenize(token, parse_special=False)
        elif 0 <= token < tokenizer.n_vocab:
            tokens = [token]
        else:
            raise fault(f"logit_bias.{key}", f": `{token}` is not a token of this model.")
        amount = -math.inf if bias is False else min(max(bias, -MOST), MOST)
        for each in tokens:
            found[each] = found.get(each, 0.0) + amount
    return tuple(found.items())


def _bias_entries(body: SamplingFields) -> Iterator[tuple[str, int | str, Bias]]:
    """Yield the path, the token id or the text, and the bias. A key of digits is an id."""
    if isinstance(body.logit_bias, dict):
        for key, bias in body.logit_bias.items():
            yield key, int(key[:12]) if _TOKEN_ID.fullmatch(key) else key, bias
    else:
        for index, (token, bias) in enumerate(body.logit_bias or ()):
            yield str(index), token, bias
