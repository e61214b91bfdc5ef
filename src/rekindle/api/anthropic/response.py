"""Complete replies in Anthropic's shape."""

from collections.abc import Sequence
from typing import Literal

from pydantic_core import from_json

from rekindle.api.anthropic.bodies import (
    CacheCreation,
    ChangeMiss,
    Diagnostics,
    MessageBody,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    UnknownMiss,
)
from rekindle.api.anthropic.schema import DiagnosticsRequest, MessagesRequest
from rekindle.api.cache.views import rekindle_of
from rekindle.api.cache_controls import TTL_SECONDS
from rekindle.api.http.usage_window import scaled
from rekindle.api.replies import Envelope, Reply
from rekindle.chat.accounts.miss_reasons import Diagnosis
from rekindle.chat.reply.events import FinishReason, ReplyDone
from rekindle.observe.request_record import MissReason

# The value is never checked. Without one, some clients resend thinking as plain text.
SIGNATURE = "rekindle"

CHANGES: dict[
    MissReason, Literal["model_changed", "system_changed", "tools_changed", "messages_changed"]
] = {
    MissReason.OTHER_MODEL: "model_changed",
    MissReason.SYSTEM_CHANGED: "system_changed",
    MissReason.TOOLS_CHANGED: "tools_changed",
    MissReason.TEXT_CHANGED: "messages_changed",
}


def message_of(body: MessagesRequest, envelope: Envelope, replies: Sequence[Reply]) -> MessageBody:
    [reply] = replies
    content: list[ThinkingBlock | TextBlock | ToolUseBlock] = []
    if reply.reasoning:
        content.append(
            ThinkingBlock(type="thinking", thinking=reply.reasoning, signature=SIGNATURE)
        )
    if reply.text:
        content.append(TextBlock(type="text", text=reply.text))
    content += [
        ToolUseBlock(
            type="tool_use", id=call.id, name=call.name, input=from_json(call.arguments_json)
        )
        for call in reply.calls
    ]
    stats = reply.done.stats
    usage = usage_of(envelope, stats.n_prompt, stats.n_cached, stats.n_generated)
    message = begun(envelope, usage)
    message["content"] = content
    message["stop_reason"] = stop_reason_of(reply.done)
    message["stop_sequence"] = reply.done.stop_sequence
    message["rekindle"] = rekindle_of([stats])
    if body.diagnostics is not None:
        message["diagnostics"] = diagnostics_of(body.diagnostics, stats.diagnosis)
    return message


def begun(envelope: Envelope, usage: MessageUsage) -> MessageBody:
    """Return a message without content."""
    return MessageBody(
        id=envelope.id,
        type="message",
        role="assistant",
        model=envelope.model,
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=usage,
    )


def diagnostics_of(wanted: DiagnosticsRequest, diagnosis: Diagnosis | None) -> Diagnostics | None:
    if wanted.previous_message_id is None or diagnosis is None:
        return None
    miss = diagnosis.miss
    if not diagnosis.is_compared:
        return Diagnostics(cache_miss_reason=UnknownMiss(type="previous_message_not_found"))
    if miss is None or miss.reason is MissReason.FIRST_REQUEST:
        return None
    if miss.reason in CHANGES:
        return Diagnostics(
            cache_miss_reason=ChangeMiss(
                type=CHANGES[miss.reason], cache_missed_input_tokens=miss.tokens_lost
            )
        )
    return Diagnostics(cache_miss_reason=UnknownMiss(type="unavailable"))


def usage_of(envelope: Envelope, n_prompt: int, n_cached: int, n_generated: int) -> MessageUsage:
    """Count uncached input up to the last breakpoint as created, and the rest as plain input."""
    pins = envelope.wanted[0].options.terms.pins
    n_created = max(min(pins[-1].n_tokens, n_prompt) - n_cached, 0) if pins else 0
    for_an_hour = bool(pins) and pins[-1].seconds == TTL_SECONDS["1h"]
    usage = MessageUsage(
        input_tokens=n_prompt - n_cached - n_created,
        cache_creation_input_tokens=n_created,
        cache_read_input_tokens=n_cached,
        cache_creation=CacheCreation(
            ephemeral_5m_input_tokens=0 if for_an_hour else n_created,
            ephemeral_1h_input_tokens=n_created if for_an_hour else 0,
        ),
        output_tokens=n_generated,
    )
    return scaled(usage, envelope.usage_scale)


def stop_reason_of(done: ReplyDone) -> StopReason:
    match done.finish:
        case FinishReason.TOOL_CALLS:
            return "tool_use"
        case FinishReason.LENGTH:
            return "max_tokens"
        case FinishReason.STOP:
            return "end_turn" if done.stop_sequence is None else "stop_sequence"
