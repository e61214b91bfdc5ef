"""Complete replies in Ollama's shapes, and the numbers at their end."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from pydantic_core import from_json

from rekindle.api.cache.views import rekindle_of
from rekindle.api.http.usage_window import scaled
from rekindle.api.ollama.bodies import (
    DoneReason,
    OllamaCallBody,
    OllamaCalledFunction,
    OllamaChat,
    OllamaEnding,
    OllamaGeneration,
    OllamaReplyMessage,
)
from rekindle.api.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from rekindle.api.openai.response import chat_logprobs
from rekindle.api.replies import Envelope, Reply
from rekindle.chat.reply.events import FinishReason, ReplyCall, ReplyDone

W = TypeVar("W", OllamaChat, OllamaGeneration)

DONE_REASONS: dict[FinishReason, DoneReason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "stop",
}


def chat_reply(_: OllamaChatRequest, envelope: Envelope, replies: Sequence[Reply]) -> OllamaChat:
    [reply] = replies
    message = OllamaReplyMessage(role="assistant", content=reply.text)
    if reply.reasoning:
        message["thinking"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [call_body(call) for call in reply.calls]
    return _whole(OllamaChat, envelope, reply, message=message)


def generation(
    body: OllamaGenerateRequest, envelope: Envelope, replies: Sequence[Reply]
) -> OllamaGeneration:
    [reply] = replies
    whole = _whole(OllamaGeneration, envelope, reply, response=reply.text)
    if reply.reasoning:
        whole["thinking"] = reply.reasoning
    if shows_context(body):
        whole["context"] = context_of(envelope, reply.done)
    return whole


def shows_context(body: OllamaGenerateRequest) -> bool:
    """Return whether a later prompt can follow the tokens of this one."""
    return not body.raw and not body.fills_in


def _whole(kind: type[W], envelope: Envelope, reply: Reply, **own: Any) -> W:
    """Make a whole reply of type `kind`. `own` has the keys that only this type has."""
    whole = {
        "model": envelope.model,
        "created_at": time_text(envelope.created),
        **own,
        "done": True,
        **ending_of(envelope, reply.done),
    }
    if reply.scored:
        whole["logprobs"] = chat_logprobs(reply.scored)["content"]
    return cast(W, whole)


def call_body(call: ReplyCall) -> OllamaCallBody:
    function = OllamaCalledFunction(
        index=call.index, name=call.name, arguments=from_json(call.arguments_json)
    )
    return OllamaCallBody(id=call.id, function=function)


def context_of(envelope: Envelope, done: ReplyDone) -> list[int]:
    return [*envelope.wanted[0].prompt.tokens, *done.tokens]


def ending_of(envelope: Envelope, done: ReplyDone) -> OllamaEnding:
    stats = done.stats
    return OllamaEnding(
        done_reason=DONE_REASONS[done.finish],
        total_duration=nanoseconds(
            envelope.load_seconds + stats.build_seconds + stats.total_seconds
        ),
        load_duration=nanoseconds(envelope.load_seconds),
        # The whole prompt: clients compare it with the size of the context.
        prompt_eval_count=scaled(stats.n_prompt, envelope.usage_scale),
        prompt_eval_duration=nanoseconds(stats.restore_seconds + stats.prefill_seconds),
        eval_count=scaled(stats.n_generated, envelope.usage_scale),
        eval_duration=nanoseconds(stats.decode_seconds),
        rekindle=rekindle_of([stats]),
    )


def nanoseconds(seconds: float) -> int:
    """Return a duration, never 0: clients divide by it."""
    return max(round(seconds * 1e9), 1)


def time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
