"""The response object: the request's settings, the output, usage and timings."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rekindle.api.body import WireModel
from rekindle.api.cache.views import rekindle_of
from rekindle.api.http.error_shapes import ErrorDetail
from rekindle.api.http.usage_window import scaled
from rekindle.api.openai.bodies import PromptTokensDetails
from rekindle.api.openai.response import timings_of
from rekindle.api.replies import Envelope
from rekindle.api.responses.bodies import (
    CacheMissDiagnostics,
    IncompleteDetails,
    OtherDiagnostics,
    OutputItem,
    OutputTokensDetails,
    ReasoningEcho,
    ResponseBody,
    ResponseFault,
    ResponseUsage,
)
from rekindle.api.responses.known_fields import known_fields
from rekindle.api.responses.schema import CreateResponseRequest, ResponseToolChoice
from rekindle.api.responses.tools import Toolbox
from rekindle.chat.accounts.miss_reasons import Diagnosis
from rekindle.chat.reply.events import FinishReason, ReplyDone, ReplyOptions, ReplyStats
from rekindle.observe.request_record import MissReason

TOO_LONG = "context_length_exceeded"
UNSUPPORTED_TOOLS = "rekindle_unsupported_tools"
PLAIN_TEXT = {"format": {"type": "text"}}
CHANGES: dict[MissReason, Literal["model_changed", "tools_changed", "input_changed"]] = {
    MissReason.OTHER_MODEL: "model_changed",
    MissReason.TOOLS_CHANGED: "tools_changed",
    MissReason.SYSTEM_CHANGED: "input_changed",
    MissReason.TEXT_CHANGED: "input_changed",
}


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Facts about a response that are known before it begins."""

    envelope: Envelope
    body: CreateResponseRequest
    toolbox: Toolbox

    @property
    def options(self) -> ReplyOptions:
        return self.envelope.wanted[0].options


def begun(head: ResponseHead) -> ResponseBody:
    envelope, body = head.envelope, head.body
    reasoning = body.reasoning
    return ResponseBody(
        id=envelope.id,
        object="response",
        created_at=envelope.created,
        completed_at=None,
        status="in_progress",
        background=False,
        error=None,
        incomplete_details=None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=envelope.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningEcho(
            effort=reasoning.effort if reasoning else None,
            summary=reasoning.summary if reasoning else None,
        ),
        safety_identifier=body.safety_identifier,
        service_tier="default",
        store=body.store is not False,
        temperature=head.options.sampling.temperature,
        text=_sent(body.text) | ({} if body.text and body.text.format else PLAIN_TEXT),
        tool_choice=_sent(body.tool_choice)
        if isinstance(body.tool_choice, ResponseToolChoice)
        else body.tool_choice or "auto",
        tools=list(head.toolbox.echo),
        top_logprobs=body.top_logprobs or 0,
        top_p=head.options.sampling.top_p,
        truncation=body.truncation or "disabled",
        usage=None,
        user=body.user,
        metadata=_metadata(head),
    )


def ended(head: ResponseHead, output: Sequence[OutputItem], done: ReplyDone) -> ResponseBody:
    body = begun(head)
    is_cut = done.finish is FinishReason.LENGTH
    body["status"] = "incomplete" if is_cut else "completed"
    if is_cut:
        body["incomplete_details"] = IncompleteDetails(reason="max_output_tokens")
    body["completed_at"] = int(time.time())
    body["output"] = list(output)
    body["usage"] = scaled(_usage(done.stats), head.envelope.usage_scale)
    body["timings"] = timings_of([done.stats])
    body["rekindle"] = rekindle_of([done.stats])
    if head.options.compare_with is not None:
        body["prompt_cache_diagnostics"] = _diagnostics(done.stats.diagnosis)
    return body


def failed(head: ResponseHead, output: Sequence[OutputItem], error: ErrorDetail) -> ResponseBody:
    body = begun(head)
    body["status"] = "failed"
    # Codex compacts the conversation on the first, gives up on the second, and retries the third.
    if error["code"] == TOO_LONG:
        code = TOO_LONG
    else:
        is_clients = error["type"] == "invalid_request_error"
        code = "invalid_prompt" if is_clients else "server_error"
    body["error"] = ResponseFault(code=code, message=error["message"])
    body["output"] = list(output)
    return body


def _metadata(head: ResponseHead) -> dict[str, Any]:
    metadata = dict(head.body.metadata or {})
    if head.toolbox.unsupported:
        metadata[UNSUPPORTED_TOOLS] = ",".join(head.toolbox.unsupported)
    return metadata


def _diagnostics(diagnosis: Diagnosis) -> CacheMissDiagnostics | OtherDiagnostics:
    miss = diagnosis.miss
    if not diagnosis.is_compared:
        return OtherDiagnostics(type="comparison_response_not_found")
    if miss is None:
        return OtherDiagnostics(type="cache_hit")
    if miss.reason in CHANGES:
        return CacheMissDiagnostics(
            type="cache_miss", reason=CHANGES[miss.reason], cache_missed_tokens=miss.tokens_lost
        )
    return OtherDiagnostics(type="unavailable")


def _usage(stats: ReplyStats) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=stats.n_prompt,
        input_tokens_details=PromptTokensDetails(
            cached_tokens=stats.n_cached, cache_write_tokens=stats.n_written
        ),
        output_tokens=stats.n_generated,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=stats.n_reasoning),
        total_tokens=stats.n_prompt + stats.n_generated,
    )


def _sent(part: WireModel | None) -> dict[str, Any]:
    return known_fields(part) if part else {}
