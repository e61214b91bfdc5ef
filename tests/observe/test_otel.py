"""Spans of replies, as OpenTelemetry's own SDK sees them."""

import logging
import threading
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from rekindle.errors import StartupError
from rekindle.generation.drafts import DraftCount, DraftCounts
from rekindle.observe import otel
from rekindle.observe.otel import ENDPOINTS, MISSING, new_provider, observer, shut_down, span_sender
from rekindle.observe.request_record import RequestRecord
from rekindle.observe.trace import Sent, sent_request
from tests.support.records import CLOCK, a_record

T0 = 1_000_000 * 10**9
SECOND = 10**9


class Collector:
    def __init__(self, provider: TracerProvider) -> None:
        self._exporter = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._observe = observer(provider)

    def spans(self, record: RequestRecord) -> dict[str, ReadableSpan]:
        self._exporter.clear()
        self._observe(record)
        return {span.name: span for span in self._exporter.get_finished_spans()}


@pytest.fixture
def collector() -> Iterator[Collector]:
    provider = new_provider()
    yield Collector(provider)
    provider.shutdown()


def times(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.start_time - T0) / SECOND, (span.end_time - T0) / SECOND


def test_a_reply_is_one_span_and_its_parts_follow_each_other(collector: Collector) -> None:
    spans = collector.spans(a_record())
    root = spans.pop("chat tiny")
    assert times(root) == (-0.5, 20)
    assert {name: times(span) for name, span in spans.items()} == {
        "render": (-0.5, 0),
        "queue": (0, 1),
        "restore": (1, 3),
        "prefill": (3, 7),
        "decode": (8, 18),
    }
    assert root.context is not None
    for span in spans.values():
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id


def test_a_span_has_the_names_that_generative_ai_agreed_on(collector: Collector) -> None:
    root = collector.spans(a_record(miss=CLOCK))["chat tiny"]
    attributes = dict(root.attributes or {})
    assert attributes["gen_ai.request.model"] == "tiny"
    assert attributes["gen_ai.usage.input_tokens"] == 1000
    assert attributes["gen_ai.usage.output_tokens"] == 11
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 700
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["rekindle.cached_tokens.disk"] == 400
    assert attributes["rekindle.miss.reason"] == "system_changed"
    assert not any("Be kind" in str(value) for value in attributes.values())


def test_a_span_has_the_drafted_and_the_accepted_tokens(collector: Collector) -> None:
    drafts = DraftCounts(reply=DraftCount(6, 2), context=DraftCount(1, 1))
    attributes = collector.spans(a_record(drafts=drafts))["chat tiny"].attributes or {}
    assert attributes["rekindle.drafted_tokens"] == 7
    assert attributes["rekindle.accepted_tokens"] == 3
    plain = collector.spans(a_record())["chat tiny"].attributes or {}
    assert "rekindle.drafted_tokens" not in plain


def test_a_reply_that_failed_early_has_only_the_parts_it_came_to(collector: Collector) -> None:
    record = a_record(is_evaluated=False, first_token_seconds=None, finish="failed: no room")
    spans = collector.spans(record)
    assert set(spans) == {"chat tiny", "render"}
    assert spans["chat tiny"].status.status_code is StatusCode.ERROR
    assert spans["chat tiny"].status.description == "failed: no room"


def test_a_span_goes_on_from_the_callers_trace(collector: Collector) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    token = sent_request.set(Sent("/v1/completions", traceparent))
    try:
        root = collector.spans(a_record())["text_completion tiny"]
    finally:
        sent_request.reset(token)
    assert root.context is not None
    assert root.parent is not None
    assert f"{root.context.trace_id:x}" == "af7651916cd43dd8448eb211c80319c"
    assert f"{root.parent.span_id:x}" == "b7ad6b7169203331"


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "PACKAGES", ("opentelemetry.sdk.trace", "no_such.package"))
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("nothing_installed")
def test_missing_packages_are_one_sentence_and_end_the_start_only_where_spans_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert span_sender(asked_for=False) is None
    assert not caplog.records
    with pytest.raises(StartupError, match="pip install"):
        span_sender(asked_for=True)
    monkeypatch.setenv(ENDPOINTS[0], "http://127.0.0.1:4318")
    with caplog.at_level(logging.WARNING):
        assert span_sender(asked_for=False) is None
    assert [record.getMessage() for record in caplog.records] == [f"otel: {MISSING}"]


class Stuck(SpanProcessor):
    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.may_end = threading.Event()

    def shutdown(self) -> None:
        self.is_asked.set()
        self.may_end.wait()


def test_a_collector_that_is_away_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "CLOSE_SECONDS", 0.01)
    provider, stuck = new_provider(), Stuck()
    provider.add_span_processor(stuck)
    shut_down(provider)  # would never come back
    assert stuck.is_asked.wait(30)
    stuck.may_end.set()
