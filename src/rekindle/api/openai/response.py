"""Complete replies in OpenAI's shapes, with llama-server's timings."""

from collections.abc import Sequence

from rekindle import __version__
from rekindle.api.cache.views import rekindle_of
from rekindle.api.http.usage_window import scaled
from rekindle.api.openai.bodies import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatFinish,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionTokensDetails,
    Finish,
    PromptTokensDetails,
    Timings,
    TokenLogprob,
    ToolCallBody,
    TopLogprob,
    Usage,
)
from rekindle.api.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
)
from rekindle.api.replies import Envelope, Reply
from rekindle.chat.reply.events import FinishReason, ReplyStats, ScoredToken, TopToken
from rekindle.generation.drafts import DraftCounts

FINGERPRINT = f"rekindle-{__version__}"
LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON lacks
FINISH: dict[FinishReason, Finish] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}
CHAT_FINISH: dict[FinishReason, ChatFinish] = {**FINISH, FinishReason.TOOL_CALLS: "tool_calls"}


def chat_completion(
    body: ChatCompletionRequest, envelope: Envelope, replies: Sequence[Reply]
) -> ChatCompletion:
    stats = [reply.done.stats for reply in replies]
    return ChatCompletion(
        id=envelope.id,
        object="chat.completion",
        created=envelope.created,
        model=envelope.model,
        system_fingerprint=FINGERPRINT,
        choices=[
            ChatChoice(
                index=index,
                message=_message(reply),
                logprobs=chat_logprobs(reply.scored) if reply.scored else None,
                finish_reason=CHAT_FINISH[reply.done.finish],
            )
            for index, reply in enumerate(replies)
        ],
        usage=scaled(usage_of(stats, body.n or 1), envelope.usage_scale),
        timings=timings_of(stats),
        rekindle=rekindle_of(stats),
    )


def completion(body: CompletionRequest, envelope: Envelope, replies: Sequence[Reply]) -> Completion:
    stats = [reply.done.stats for reply in replies]
    echoes = [one.prompt.text if body.echo else "" for one in envelope.wanted]
    return Completion(
        id=envelope.id,
        object="text_completion",
        created=envelope.created,
        model=envelope.model,
        system_fingerprint=FINGERPRINT,
        choices=[
            CompletionChoice(
                index=index,
                text=echo + reply.text,
                logprobs=completion_logprobs(reply.scored) if reply.scored else None,
                finish_reason=FINISH[reply.done.finish],
            )
            for index, (echo, reply) in enumerate(zip(echoes, replies, strict=True))
        ],
        usage=scaled(usage_of(stats, body.n or 1), envelope.usage_scale),
        timings=timings_of(stats),
        rekindle=rekindle_of(stats),
    )


def chat_logprobs(scored: Sequence[ScoredToken]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            TokenLogprob(
                **_top_logprob(token.chosen),
                top_logprobs=[_top_logprob(candidate) for candidate in token.top],
            )
            for token in scored
        ],
        refusal=None,
    )


def completion_logprobs(scored: Sequence[ScoredToken]) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[_key(token.chosen) for token in scored],
        token_logprobs=[_finite(token.chosen.logprob) for token in scored],
        # With the sampled token, which may be one more than the client asked for.
        top_logprobs=[
            {_key(each): _finite(each.logprob) for each in (*token.top, token.chosen)}
            for token in scored
        ],
        text_offset=[token.text_offset for token in scored],
    )


def usage_of(stats: Sequence[ReplyStats], n_per_prompt: int) -> Usage:
    """Sum the usage. A prompt with several replies counts once."""
    prompts = [stats[i : i + n_per_prompt] for i in range(0, len(stats), n_per_prompt)]
    n_prompt = sum(replies[0].n_prompt for replies in prompts)
    n_generated = sum(each.n_generated for each in stats)
    # Replies to one prompt share its rows: the reply with the fewest cached tokens computed them.
    n_cached = sum(min(each.n_cached for each in replies) for replies in prompts)
    n_written = sum(max(each.n_written for each in replies) for replies in prompts)
    return Usage(
        prompt_tokens=n_prompt,
        completion_tokens=n_generated,
        total_tokens=n_prompt + n_generated,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=n_cached, cache_write_tokens=n_written
        ),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=sum(each.n_reasoning for each in stats)
        ),
    )


def timings_of(stats: Sequence[ReplyStats]) -> Timings:
    """Sum the tokens of all replies over the longest time, because they run in parallel."""
    timings = timings_from(
        n_cached=sum(each.n_cached for each in stats),
        n_prefilled=sum(each.n_prefilled for each in stats),
        prefill_seconds=max(each.prefill_seconds for each in stats),
        n_generated=sum(each.n_generated for each in stats),
        decode_seconds=max(each.decode_seconds for each in stats),
        n_replies=sum(1 for each in stats if each.n_generated),
    )
    drafts = sum((each.drafts for each in stats), DraftCounts())
    if drafts.n_tokens:
        timings["draft_n"] = drafts.n_tokens
        timings["draft_n_accepted"] = drafts.n_accepted
    return timings


def timings_from(
    *,
    n_cached: int,
    n_prefilled: int,
    prefill_seconds: float,
    n_generated: int,
    decode_seconds: float,
    n_replies: int = 1,
) -> Timings:
    prompt_ms, predicted_ms = prefill_seconds * 1e3, decode_seconds * 1e3
    # As in llama-server, the first token is free: it comes from the prompt's logits.
    n_steps = max(n_generated - n_replies, 0)
    return Timings(
        cache_n=n_cached,
        prompt_n=n_prefilled,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, n_prefilled),
        prompt_per_second=_ratio(n_prefilled, prompt_ms / 1e3),
        predicted_n=n_generated,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_ratio(predicted_ms, n_steps),
        predicted_per_second=_ratio(n_steps, predicted_ms / 1e3),
    )


def _message(reply: Reply) -> AssistantMessage:
    content = None if reply.calls and not reply.text else reply.text
    message = AssistantMessage(role="assistant", content=content, refusal=None)
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            ToolCallBody(
                id=call.id,
                type="function",
                function=CalledFunction(name=call.name, arguments=call.arguments_json),
            )
            for call in reply.calls
        ]
    return message


def _top_logprob(candidate: TopToken) -> TopLogprob:
    return TopLogprob(
        token=candidate.text, logprob=_finite(candidate.logprob), bytes=list(candidate.data)
    )


def _key(candidate: TopToken) -> str:
    """Return the token's text, or OpenAI's legacy notation for a part of a character."""
    if candidate.text.encode() == candidate.data:
        return candidate.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in candidate.data)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _ratio(dividend: float, divisor: float) -> float:
    return dividend / divisor if divisor else 0.0
