"""Conversion of completion requests to `ReplyOptions`."""

from collections.abc import Sequence

from rekindle.api.body import fault
from rekindle.api.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    ResponseFormat,
)
from rekindle.api.openai.tools import tool_choice_of
from rekindle.api.pipeline import RawPrompt
from rekindle.api.requests.sampling import SamplingFields, llama_sampling_of
from rekindle.api.tools import check_grammar, json_grammar
from rekindle.chat.conversation import Tool
from rekindle.chat.infill import Infill
from rekindle.chat.reply.events import ReplyOptions, ToolMode
from rekindle.errors import InvalidRequest
from rekindle.generation.request import Grammar, Sampling
from rekindle.generation.tokenizer import Tokenizer


def chat_options(
    body: ChatCompletionRequest,
    tools: Sequence[Tool],
    defaults: Sampling,
    tokenizer: Tokenizer,
) -> ReplyOptions:
    if body.modalities and body.modalities != ["text"]:
        raise fault("modalities", ": only `text` is supported.")
    if body.top_logprobs is not None and not body.logprobs:
        raise fault("top_logprobs", " requires `logprobs` to be true.")
    tool_choice = tool_choice_of(body, tools)
    sampling = sampling_for(body, defaults, tokenizer, _grammar(body.response_format))
    if sampling.grammar is not None:
        check_grammar(sampling.grammar, tool_choice, _field_of(sampling.grammar))
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
        max_tokens=max_tokens_of(limits),
        stop=stop_of(body.stop),
        n_top_logprobs=(body.top_logprobs or 0) if body.logprobs else body.n_probs or None,
        tool_choice=tool_choice,
    )


def completion_options(
    body: CompletionRequest, defaults: Sampling, tokenizer: Tokenizer
) -> ReplyOptions:
    if body.best_of not in (None, 1):
        raise fault("best_of", " other than 1 is not supported. Use `n`.")
    if body.echo and body.logprobs is not None:
        raise fault("echo", " together with `logprobs` is not supported.")
    if body.echo and body.suffix:
        raise fault("echo", " together with `suffix` is not supported.")
    return ReplyOptions(
        sampling=sampling_for(body, defaults, tokenizer, _grammar(body.response_format)),
        max_tokens=_completion_limit(body),
        stop=stop_of(body.stop),
        n_top_logprobs=body.n_probs or None if body.logprobs is None else body.logprobs,
    )


def raw_inputs(
    field: str, value: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
) -> list[tuple[str, str | Sequence[int]]]:
    """List the texts or token sequences of a field that holds one or several, with their paths."""
    if isinstance(value, str):
        return [(field, value)]
    if tokens := [item for item in value if isinstance(item, int)]:
        return [(field, tokens)]
    several = [item for item in value if not isinstance(item, int)]
    return [(f"{field}.{index}", item) for index, item in enumerate(several)]


def completion_prompts(body: CompletionRequest) -> list[RawPrompt]:
    prompts = raw_inputs("prompt", body.prompt)
    if not body.suffix:
        return [RawPrompt(path, content) for path, content in prompts]
    limit = _completion_limit(body)
    return [
        RawPrompt(
            "suffix",
            Infill(
                prefix=content,
                suffix=body.suffix,
                n_predict=limit,
                prefix_path=path,
                suffix_path="suffix",
            ),
        )
        for path, content in prompts
    ]


def sampling_for(
    body: SamplingFields, defaults: Sampling, tokenizer: Tokenizer, grammar: Grammar | None
) -> Sampling:
    """Replace the defaults. `grammar` is that of a field which other formats lack."""
    sampling = llama_sampling_of(body, defaults, tokenizer, grammar)
    if sampling.grammar is not None and body.ignore_eos:
        field = _field_of(sampling.grammar)
        raise fault("ignore_eos", f" excludes `{field}`: the reply must be able to end.")
    return sampling


def _field_of(grammar: Grammar) -> str:
    """Return the field of the body that asks for a grammar."""
    return grammar.field.partition(".")[0]


def _completion_limit(body: CompletionRequest) -> int | None:
    return max_tokens_of((("max_tokens", body.max_tokens), ("n_predict", body.n_predict)))


def max_tokens_of(limits: Sequence[tuple[str, int | None]]) -> int | None:
    for name, limit in limits:
        if limit is not None and limit < -1:
            raise InvalidRequest(
                f"`{name}` should be positive, 0 to evaluate the prompt alone,"
                " or -1 for as much as the context holds.",
                name,
            )
    first = next((limit for _, limit in limits if limit is not None), None)
    return None if first == -1 else first


def stop_of(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _grammar(wanted: ResponseFormat | None) -> Grammar | None:
    if wanted is None:
        return None
    schema = wanted.object_schema
    if wanted.type == "json_schema":
        schema = wanted.json_schema.json_schema if wanted.json_schema else None
    return json_grammar(wanted.type, schema, "response_format.json_schema")
