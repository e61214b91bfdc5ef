"""Complete replies in Gemini's shape."""

from collections.abc import Sequence

from pydantic_core import from_json

from rekindle.api.cache.views import rekindle_of
from rekindle.api.gemini.bodies import (
    CalledGeminiFunction,
    GeminiFinish,
    GenerateContentBody,
    LogprobsCandidate,
    LogprobsResult,
    ReplyCandidate,
    ReplyContent,
    ReplyPartBody,
    TopCandidates,
    UsageMetadata,
)
from rekindle.api.gemini.schema import GenerateContentRequest
from rekindle.api.http.usage_window import scaled
from rekindle.api.replies import Envelope, Reply
from rekindle.chat.reply.events import FinishReason, ReplyCall, ReplyStats, ScoredToken, TopToken

LEAST_LOGPROB = -9999.0  # for minus infinity, which JSON lacks
FINISH: dict[FinishReason, GeminiFinish] = {
    FinishReason.STOP: "STOP",
    FinishReason.TOOL_CALLS: "STOP",
    FinishReason.LENGTH: "MAX_TOKENS",
}


def includes_thoughts(body: GenerateContentRequest) -> bool:
    thinking = body.config.thinking_config
    return bool(thinking and thinking.include_thoughts)


def content_body(
    envelope: Envelope, replies: Sequence[Reply], *, thinks: bool
) -> GenerateContentBody:
    """Make the body. `thinks`: with the thoughts."""
    stats = [reply.done.stats for reply in replies]
    return GenerateContentBody(
        candidates=[_candidate(index, reply, thinks=thinks) for index, reply in enumerate(replies)],
        modelVersion=envelope.model,
        responseId=envelope.id,
        usageMetadata=scaled(usage_of(stats), envelope.usage_scale),
        rekindle=rekindle_of(stats),
    )


def usage_of(stats: Sequence[ReplyStats]) -> UsageMetadata:
    """Sum the usage of all candidates. Their prompt counts once."""
    n_prompt = stats[0].n_prompt
    n_generated = sum(each.n_generated for each in stats)
    n_reasoning = sum(each.n_reasoning for each in stats)
    usage = UsageMetadata(
        promptTokenCount=n_prompt,
        # Candidates share the rows of the prompt: one of them computed the rest.
        cachedContentTokenCount=min(each.n_cached for each in stats),
        candidatesTokenCount=n_generated - n_reasoning,
        totalTokenCount=n_prompt + n_generated,
    )
    if n_reasoning:
        usage["thoughtsTokenCount"] = n_reasoning
    return usage


def call_part(call: ReplyCall) -> ReplyPartBody:
    called = CalledGeminiFunction(
        id=call.id, name=call.name, args=from_json(call.arguments_json or "{}")
    )
    return ReplyPartBody(functionCall=called)


def logprobs_of(scored: Sequence[ScoredToken]) -> LogprobsResult:
    return LogprobsResult(
        topCandidates=[
            TopCandidates(candidates=[_scored(each) for each in token.top]) for token in scored
        ],
        chosenCandidates=[_scored(token.chosen) for token in scored],
    )


def _candidate(index: int, reply: Reply, *, thinks: bool) -> ReplyCandidate:
    parts: list[ReplyPartBody] = []
    if reply.reasoning and thinks:
        parts.append(ReplyPartBody(text=reply.reasoning, thought=True))
    if reply.text or not reply.calls:
        parts.append(ReplyPartBody(text=reply.text))
    parts += map(call_part, reply.calls)
    candidate = ReplyCandidate(
        content=ReplyContent(parts=parts, role="model"),
        finishReason=FINISH[reply.done.finish],
        index=index,
    )
    if scored := reply.scored:
        sampled = [_finite(token.chosen.logprob) for token in scored]
        candidate["avgLogprobs"] = sum(sampled) / len(sampled)
        candidate["logprobsResult"] = logprobs_of(scored)
    return candidate


def _scored(token: TopToken) -> LogprobsCandidate:
    return LogprobsCandidate(
        token=token.text, tokenId=token.token, logProbability=_finite(token.logprob)
    )


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
