"""Conversion of completion requests to `ReplyOptions`."""

from collections.abc import Sequence

from rekindle.api.body import fault
from rekindle.api.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    ResponseFormat,
)
from rekindle.api.openai.tools import tool_choice_of
from rekindle.api.pipeline import RawPrompt
from rekindle.api.requests.sampling import llama_sampling_of
from rekindle.api.tools import check_grammar, json_grammar
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
        n_top_logprobs=(body.top_logprobs or 0) if body.logprobs else body.n_probs or None,
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
        n_top_logprobs=body.n_probs or None if body.logprobs is None else body.logprobs,
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
    sampling = llama_sampling_of(body, defaults, n_vocab, _grammar(body.response_format))
    if sampling.grammar is not None and body.ignore_eos:
        field = sampling.grammar.field.partition(".")[0]
        raise fault("ignore_eos", f" excludes `{field}`: the reply must be able to end.")
    return sampling


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


def _grammar(wanted: ResponseFormat | None) -> Grammar | None:
    if wanted is None:
        return None
    schema = wanted.object_schema
    if wanted.type == "json_schema":
        schema = wanted.json_schema.json_schema if wanted.json_schema else None
    return json_grammar(wanted.type, schema, "response_format.json_schema")
