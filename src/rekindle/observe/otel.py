"""Spans for OpenTelemetry: one per reply, with a child span for each phase.

The packages are optional, and imported only when spans are on. The names follow the semantic
conventions for generative AI. They are literals here, because that package is not stable.
"""

import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rekindle import __version__
from rekindle.errors import StartupError
from rekindle.observe.request_record import Observer, RequestRecord
from rekindle.observe.trace import sent_request

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

_log = logging.getLogger("rekindle.observe.otel")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
MISSING = "Spans need packages that are not installed: pip install 'rekindle[otel]'."
CLOSE_SECONDS = 5.0  # picked
OPERATIONS = {"/v1/completions": "text_completion", "/completion": "text_completion"}


@dataclass(frozen=True, slots=True)
class SpanSender:
    observe: Observer
    close: Callable[[], None]


def span_sender(*, asked_for: bool) -> SpanSender | None:
    """Return None if spans are off, or their packages are missing.

    Raises StartupError if they are missing and `asked_for` by the operator.
    """
    if not asked_for and not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    if not all(map(_is_installed, PACKAGES)):
        if asked_for:
            raise StartupError(MISSING)
        _log.warning("otel: %s", MISSING)  # the variable may be set for other programs
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = new_provider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return SpanSender(observer(provider), lambda: shut_down(provider))


def new_provider() -> "TracerProvider":
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider

    ours = Resource({"service.name": "rekindle", "service.version": __version__})
    resource = ours.merge(OTELResourceDetector().detect())
    return TracerProvider(resource=resource, shutdown_on_exit=False)


def shut_down(provider: "TracerProvider") -> None:
    """Send waiting spans for CLOSE_SECONDS. The SDK alone would retry for half a minute."""
    sending = threading.Thread(target=provider.shutdown, name="otel-shutdown", daemon=True)
    sending.start()
    sending.join(CLOSE_SECONDS)


def observer(provider: "TracerProvider") -> Observer:
    tracer = provider.get_tracer("rekindle", __version__)
    return lambda record: _send(tracer, record)


def phases_of(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """Yield each phase that the reply reached, and its start and end in seconds since the epoch."""
    handed_over = record.started_at
    yield "render", handed_over - record.build_seconds, handed_over
    if not record.is_evaluated:
        return
    at = handed_over
    for name, seconds in (
        ("queue", record.queue_seconds),
        ("restore", record.restore_seconds),
        ("prefill", record.prefill_seconds),
    ):
        if seconds > 0:
            yield name, at, at + seconds
            at += seconds
    if record.first_token_seconds is not None:
        first = handed_over + record.first_token_seconds
        yield "decode", first, first + record.decode_seconds


def attributes_of(record: RequestRecord, path: str | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": OPERATIONS.get(path or "", "chat"),
        "gen_ai.provider.name": "rekindle",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.id,
        "gen_ai.response.finish_reasons": (record.finish.partition(":")[0],),
        "gen_ai.conversation.id": record.session,
        "gen_ai.usage.input_tokens": record.n_prompt,
        "gen_ai.usage.output_tokens": record.n_generated,
        "gen_ai.usage.cache_read.input_tokens": record.n_cached,
        "rekindle.prefilled_tokens": record.n_prefilled,
        "rekindle.prefilled_twice_tokens": record.n_recomputed,
        "rekindle.remembered_turns": record.n_remembered_turns,
    }
    for source, n_tokens in record.spans.by_source().items():
        attributes[f"rekindle.cached_tokens.{source.value}"] = n_tokens
    if record.drafts.n_tokens:
        attributes["rekindle.drafted_tokens"] = record.drafts.n_tokens
        attributes["rekindle.accepted_tokens"] = record.drafts.n_accepted
    if record.miss is not None:  # its texts are left out: they belong to the client
        attributes["rekindle.miss.reason"] = record.miss.reason.value
        attributes["rekindle.miss.tokens_lost"] = record.miss.tokens_lost
    return attributes


def _send(tracer: "Tracer", record: RequestRecord) -> None:
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    sent = sent_request.get()
    caller = {"traceparent": sent.traceparent} if sent and sent.traceparent else {}
    attributes = attributes_of(record, sent.path if sent else None)
    root = tracer.start_span(
        f"{attributes['gen_ai.operation.name']} {record.model}",
        context=TraceContextTextMapPropagator().extract(caller),
        kind=SpanKind.SERVER,
        attributes=attributes,
        start_time=_ns(record.started_at - record.build_seconds),
    )
    within = set_span_in_context(root)
    for name, began_at, ended_at in phases_of(record):
        child = tracer.start_span(name, context=within, start_time=_ns(began_at))
        child.end(_ns(ended_at))
    if record.finish.startswith("failed"):
        root.set_status(Status(StatusCode.ERROR, record.finish))
    root.end(_ns(record.started_at + record.total_seconds))


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
