"""Complete replies in llama-server's own shape."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rekindle.api.cache.views import rekindle_of
from rekindle.api.completion.bodies import (
    CandidateToken,
    GenerationSettings,
    NativeCompletion,
    StopType,
    TokenBias,
    TokenChances,
)
from rekindle.api.completion.schema import NativeFields
from rekindle.api.json import body_from
from rekindle.api.openai.response import timings_of
from rekindle.api.replies import Envelope, Reply
from rekindle.chat.reply.events import (
    FinishReason,
    ReplyDone,
    ReplyOptions,
    ReplyText,
    ScoredToken,
    TopToken,
)

# llama-server's value for minus infinity, which JSON lacks: the lowest 32-bit float.
LEAST_LOGPROB = -3.4028234663852886e38


def native_reply(
    body: NativeFields, envelope: Envelope, replies: Sequence[Reply]
) -> NativeCompletion | list[NativeCompletion]:
    """Return the reply, or a list if there are several."""
    entries = []
    for index, reply in enumerate(replies):
        tokens = [
            token for part in reply.parts if isinstance(part, ReplyText) for token in part.tokens
        ]
        entry = last_entry(body, envelope, index, reply.done, content=reply.text, tokens=tokens)
        if reply.scored:
            entry["completion_probabilities"] = chances_of(reply.scored, body)
        entries.append(selected(entry, body))
    return entries[0] if len(entries) == 1 else entries


def last_entry(
    body: NativeFields,
    envelope: Envelope,
    index: int,
    done: ReplyDone,
    *,
    content: str,
    tokens: Sequence[int],
    has_new_line: bool | None = None,  # None: as the content has
) -> NativeCompletion:
    wanted, stats = envelope.wanted[index], done.stats
    return NativeCompletion(
        index=index,
        content=content,
        tokens=list(tokens),
        id_slot=slot_of(body),
        stop=True,
        model=envelope.model,
        tokens_predicted=stats.n_generated,
        tokens_evaluated=stats.n_prompt,
        generation_settings=settings_of(body, wanted.options),
        prompt=wanted.prompt.text,
        has_new_line="\n" in content if has_new_line is None else has_new_line,
        truncated=_is_truncated(done, wanted.options),
        stop_type=_stop_type(done),
        stopping_word=done.stop_sequence or "",
        tokens_cached=stats.n_prompt + stats.n_generated,
        timings=timings_of([stats]),
        rekindle=rekindle_of([stats]),
    )


def selected(entry: NativeCompletion, body: NativeFields) -> NativeCompletion:
    """Return the fields that the client asks for. `a/b` is the field `b` of `a`."""
    if not body.response_fields:
        return entry
    found: dict[str, Any] = {}
    for path in body.response_fields:
        value: Any = entry
        for key in path.split("/"):
            if not isinstance(value, Mapping) or key not in value:
                break
            value = value[key]
        else:
            found[path] = value
    return cast(NativeCompletion, found)


def slot_of(body: NativeFields) -> int:
    return -1 if body.id_slot is None else body.id_slot


def chances_of(scored: Sequence[ScoredToken], body: NativeFields) -> list[TokenChances]:
    is_after = body.post_sampling_probs is True
    chances = []
    for token in scored:
        chance = cast(TokenChances, _candidate(token.chosen, is_after=is_after))
        top = [_candidate(each, is_after=is_after) for each in token.top]
        if is_after:
            # Samplers leave few candidates. The others are not listed, as in llama-server.
            chance["top_probs"] = [each for each in top if each["prob"] > 0]
        else:
            chance["top_logprobs"] = top
        chances.append(chance)
    return chances


def settings_of(body: NativeFields, options: ReplyOptions) -> GenerationSettings:
    sampling = options.sampling
    n_predict = -1 if options.max_tokens is None else options.max_tokens
    return body_from(
        GenerationSettings,
        sampling,
        seed=-1 if sampling.seed is None else sampling.seed,
        max_tokens=n_predict,
        n_predict=n_predict,
        n_probs=options.n_top_logprobs or 0,
        samplers=[each.value for each in sampling.samplers],
        dry_sequence_breakers=list(sampling.dry_sequence_breakers),
        stop=list(options.stop),
        n_keep=0,
        n_discard=0,
        stream=bool(body.stream),
        logit_bias=[
            TokenBias(token=token, bias=bias if math.isfinite(bias) else None)
            for token, bias in sampling.logit_bias
        ],
        grammar=sampling.grammar.source if sampling.grammar else "",
        grammar_lazy=False,
        chat_format="Content-only",
        timings_per_token=body.timings_per_token is True,
        lora=[],
    )


def _candidate(token: TopToken, *, is_after: bool) -> CandidateToken:
    entry = CandidateToken(id=token.token, token=token.text, bytes=list(token.data))
    if is_after:
        entry["prob"] = math.exp(token.logprob)
    else:
        entry["logprob"] = max(token.logprob, LEAST_LOGPROB)
    return entry


def _is_truncated(done: ReplyDone, options: ReplyOptions) -> bool:
    """Return whether the end of the context ended the reply."""
    limit = options.max_tokens
    return (
        done.finish is FinishReason.LENGTH
        and (limit is None or done.stats.n_generated < limit)
        and not done.at_line
    )


def _stop_type(done: ReplyDone) -> StopType:
    if done.finish is FinishReason.LENGTH:
        return "limit"
    return "eos" if done.stop_sequence is None else "word"
