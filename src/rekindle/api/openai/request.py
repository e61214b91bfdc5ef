"""Conversion of completion requests to `ReplyOptions`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rekindle.api.body import fault
from rekindle.api.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    ResponseFormat,
)
from rekindle.api.openai.tools import tool_choice_of
from rekindle.api.pipeline import N_SEEDS, RawPrompt
from rekindle.api.tools import check_grammar, json_grammar, sampling_of
from rekindle.chat.conversation import Tool
from rekindle.chat.reply.events import ReplyOptions, ToolMode
from rekindle.errors import InvalidRequest
from rekindle.generation.request import Grammar, Sampling


def chat_options(
    body: ChatCompletionRequest,
    tools: Sequence[Tool],
    defaults: Sampling,
    n_vocab: int,
) -> ReplyOptions:
    if body.modalities and body.modalities != ["text"]:
        raise fault("modalities", ": only `text` is supported.")
    if body.top_logprobs is not None and not body.logprobs:
        raise fault("top_logprobs", " requires `logprobs` to be true.")
    tool_choice = tool_choice_of(body, tools)
    sampling = _sampling(body, defaults, n_vocab)
    check_grammar(sampling.grammar, tool_choice, "response_format")
    if tool_choice.mode is ToolMode.REQUIRED and body.ignore_eos:
        raise fault(
            "ignore_eos", " excludes a required `tool_choice`: the call must be able to end."
        )
    limits = (
        ("max_completion_tokens", body.max_completion_tokens),
        ("max_tokens", body.max_tokens),
        ("n_predict", body.n_predict),
    )
    return ReplyOptions(
        sampling=sampling,
        max_tokens=_max_tokens(limits),
        stop=_stop(body),
        n_top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        tool_choice=tool_choice,
    )


def completion_options(body: CompletionRequest, defaults: Sampling, n_vocab: int) -> ReplyOptions:
    if body.best_of not in (None, 1):
        raise fault("best_of", " other than 1 is not supported. Use `n`.")
    if body.echo and body.logprobs is not None:
        raise fault("echo", " together with `logprobs` is not supported.")
    return ReplyOptions(
        sampling=_sampling(body, defaults, n_vocab),
        max_tokens=_max_tokens((("max_tokens", body.max_tokens), ("n_predict", body.n_predict))),
        stop=_stop(body),
        n_top_logprobs=body.logprobs,
    )


def raw_inputs(
    field: str, value: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
) -> list[RawPrompt]:
    """List the texts or token sequences of a field that holds one or several."""
    if isinstance(value, str):
        return [RawPrompt(field, value)]
    if tokens := [item for item in value if isinstance(item, int)]:
        return [RawPrompt(field, tokens)]
    several = [item for item in value if not isinstance(item, int)]
    return [RawPrompt(f"{field}.{index}", item) for index, item in enumerate(several)]


def _sampling(body: GenerationFields, defaults: Sampling, n_vocab: int) -> Sampling:
    grammar = _grammar(body.response_format)
    if grammar is not None and body.ignore_eos:
        raise fault("ignore_eos", " excludes `response_format`: the reply must be able to end.")
    sampling = sampling_of(body, defaults, grammar)
    if body.repetition_penalty is not None and body.repeat_penalty is None:
        sampling = replace(sampling, repeat_penalty=body.repetition_penalty)
    return replace(
        sampling,
        seed=defaults.seed if body.seed is None or body.seed == -1 else body.seed % N_SEEDS,
        logit_bias=tuple(_logit_bias(body, n_vocab)) or defaults.logit_bias,
    )


def _max_tokens(limits: Sequence[tuple[str, int | None]]) -> int | None:
    for name, limit in limits:
        if limit is not None and limit < -1:
            raise InvalidRequest(
                f"`{name}` should be positive, 0 to evaluate the prompt alone,"
                " or -1 for as much as the context holds.",
                name,
            )
    first = next((limit for _, limit in limits if limit is not None), None)
    return None if first == -1 else first


def _stop(body: GenerationFields) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _logit_bias(body: GenerationFields, n_vocab: int) -> Iterator[tuple[int, float]]:
    if isinstance(body.logit_bias, dict):
        entries = [(key, key, bias) for key, bias in body.logit_bias.items()]
    else:
        entries = [
            (str(index), str(token), bias)
            for index, (token, bias) in enumerate(body.logit_bias or ())
        ]
    for key, token, bias in entries:
        if not (token.isdecimal() and len(token) < 12 and int(token) < n_vocab):
            raise fault(f"logit_bias.{key}", f": `{token}` is not a token of this model.")
        yield int(token), -math.inf if bias is False else bias


def _grammar(wanted: ResponseFormat | None) -> Grammar | None:
    if wanted is None:
        return None
    schema = wanted.object_schema
    if wanted.type == "json_schema":
        schema = wanted.json_schema.json_schema if wanted.json_schema else None
    return json_grammar(wanted.type, schema, "response_format.json_schema")
