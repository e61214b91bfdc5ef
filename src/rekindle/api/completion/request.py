"""Conversion of llama-server's completion requests to prompts and `ReplyOptions`."""

from collections.abc import Iterator, Sequence

from rekindle.api.body import fault
from rekindle.api.completion.schema import (
    InfillRequest,
    MixedList,
    NativeFields,
    NativeRequest,
    PromptObject,
)
from rekindle.api.openai.request import max_tokens_of, sampling_for, stop_of
from rekindle.api.openai.schema import MAX_PROMPTS
from rekindle.api.pipeline import RawPrompt
from rekindle.chat.infill import FileChunk, Infill
from rekindle.chat.mixed_tokens import Mixed
from rekindle.chat.reply.events import LineLimits, ReplyOptions
from rekindle.generation.request import Sampling
from rekindle.generation.tokenizer import Tokenizer

LIMITS = ("n_predict", "max_completion_tokens", "max_tokens")  # the first that is set counts


def native_options(body: NativeFields, defaults: Sampling, tokenizer: Tokenizer) -> ReplyOptions:
    n_probs = body.logprobs if body.n_probs is None else body.n_probs
    return ReplyOptions(
        sampling=sampling_for(body, defaults, tokenizer, None),
        max_tokens=limit_of(body),
        stop=stop_of(body.stop),
        line_limits=LineLimits(
            n_indent=body.n_indent or 0,
            seconds=max(body.t_max_predict_ms or 0, 0) / 1e3,
        ),
        n_top_logprobs=min(n_probs, tokenizer.n_vocab) if n_probs else None,
        shows_tokens=bool(body.stream or body.return_tokens),
    )


def limit_of(body: NativeFields) -> int | None:
    return max_tokens_of([(name, getattr(body, name)) for name in LIMITS])


def n_replies(body: NativeFields) -> int:
    return body.n_cmpl or body.n or 1


def prompts_of(body: NativeRequest) -> list[RawPrompt]:
    """List the prompts. A list that contains a number is one prompt, as in llama-server."""
    prompt = body.prompt
    if not isinstance(prompt, list):
        return [_one_prompt("prompt", prompt)]
    if any(isinstance(part, int) for part in prompt):
        return [_one_prompt("prompt", list(_flat(prompt)))]
    if len(prompt) > MAX_PROMPTS:
        raise fault("prompt", f" should have at most {MAX_PROMPTS} items.")
    several = [part for part in prompt if not isinstance(part, int)]
    return [_one_prompt(f"prompt.{index}", each) for index, each in enumerate(several)]


def infill_of(body: InfillRequest) -> list[RawPrompt]:
    chunks = [FileChunk(each.text, each.filename) for each in body.input_extra or ()]
    infill = Infill(
        prefix=body.input_prefix,
        suffix=body.input_suffix,
        chunks=chunks,
        prompt=body.prompt or "",
        n_predict=limit_of(body),
    )
    return [RawPrompt("", infill)]


def _flat(parts: Sequence[int | str | MixedList | PromptObject]) -> Iterator[int | str]:
    for index, part in enumerate(parts):
        if not isinstance(part, int | str):
            raise fault(
                f"prompt.{index}", " should be a token id or a text, beside other token ids."
            )
        yield part


def _one_prompt(path: str, content: str | MixedList | PromptObject) -> RawPrompt:
    if isinstance(content, PromptObject):
        if content.multimodal_data:
            raise fault(f"{path}.multimodal_data", " is not supported by this model.")
        return _one_prompt(f"{path}.prompt_string", content.prompt_string)
    if isinstance(content, str):
        return RawPrompt(path, content)
    if tokens := [part for part in content if isinstance(part, int)]:
        return RawPrompt(path, tokens if len(tokens) == len(content) else Mixed(content))
    return RawPrompt(path, Mixed(content))
