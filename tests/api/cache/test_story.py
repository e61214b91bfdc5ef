"""How each dialect tells what was found in the cache, and why not more."""

import json
from dataclasses import replace
from typing import Any

import pytest
from anthropic.types.beta import BetaDiagnostics
from openai.types.responses import Response
from pydantic import TypeAdapter

from rekindle.api.anthropic.response import diagnostics_of, message_of
from rekindle.api.anthropic.schema import DiagnosticsRequest, MessageEntry, MessagesRequest
from rekindle.api.anthropic.stream import MessageEvents
from rekindle.api.cache.bodies import Rekindle
from rekindle.api.http.cache_header import cache_header_value
from rekindle.api.openai.response import usage_of
from rekindle.api.replies import Reply
from rekindle.api.responses.response import ResponseHead, ended
from rekindle.api.responses.schema import CreateResponseRequest
from rekindle.api.responses.tools import toolbox_of
from rekindle.chat.accounts.miss_reasons import Diagnosis
from rekindle.chat.conversation import StickyTools, ToolsChange
from rekindle.chat.reply.events import OmittedMedia, ReplyDone, ReplyProgress, ReplyText
from rekindle.generation.drafts import DraftCount, DraftCounts
from rekindle.generation.events import CachedSpan, CacheSource, Spans
from rekindle.generation.request import Rank
from rekindle.observe.request_record import Miss, MissReason
from tests.api.client import chat, post
from tests.api.fakes import FakeResponder, done, envelope

MISS = Miss(
    reason=MissReason.TEXT_CHANGED,
    message=3,
    part="tool_result",
    before="at ",
    expected="12:01",
    got="12:02",
    tokens_lost=640,
)
MISS_BODY = {
    "reason": "text_changed",
    "message": 3,
    "part": "tool_result",
    "before": "at ",
    "expected": "12:01",
    "got": "12:02",
    "tokens_lost": 640,
}


def told(miss: Miss | None, *, is_explained: bool = True, is_compared: bool = True) -> ReplyDone:
    plain = done()
    stats = replace(
        plain.stats,
        miss=miss,
        diagnosis=Diagnosis(miss, is_compared=is_compared),
        is_explained=is_explained,
        session="agent-7",
        rank=Rank.BACKGROUND,
        n_recomputed=5,
    )
    return replace(plain, stats=stats)


def story_of(path: str, end: ReplyDone, *, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    if path == "/v1/responses":
        body = {"input": "hi"}
    reply = post(path, {**body, "stream": stream}, FakeResponder((ReplyText("a"), end)))
    if not stream:
        whole: dict[str, Any] = reply.json()["rekindle"]
        return whole
    frames = [json.loads(line[6:]) for line in reply.text.splitlines() if line[6:7] == "{"]
    frames = [frame.get("response", frame) for frame in frames]
    [story] = [frame["rekindle"] for frame in frames if "rekindle" in frame]
    assert isinstance(story, dict)
    return story


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_every_wire_format_names_every_source(path: str) -> None:
    spans = tuple(CachedSpan(source, i, i + 1) for i, source in enumerate(CacheSource))
    story = story_of(path, done(n_cached=len(spans), spans=spans), stream=False)
    TypeAdapter(Rekindle).validate_python(story, extra="forbid")
    assert [each["tier"] for each in story["cached"]] == list(CacheSource)
    assert [each["source"] for each in story["spans"]] == list(CacheSource)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_every_wire_format_reports_a_miss_on_request(
    path: str,
    stream: bool,  # noqa: FBT001
) -> None:
    story = story_of(path, told(MISS), stream=stream)
    TypeAdapter(Rekindle).validate_python(story, extra="forbid")
    assert story["miss"] == MISS_BODY
    assert (story["session"], story["class"]) == ("agent-7", "background")
    assert story["prefilled_twice"] == 5
    assert story_of(path, told(None), stream=stream)["miss"] is None
    assert "miss" not in story_of(path, told(MISS, is_explained=False), stream=stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_every_wire_format_reports_sticky_tools(
    path: str,
    stream: bool,  # noqa: FBT001
) -> None:
    plain = done()
    sticky = StickyTools(ToolsChange.DROPPED, n_tools=9, n_prefill_as_sent=500)
    end = replace(plain, stats=replace(plain.stats, sticky=sticky, n_sticky_saved=480))
    story = story_of(path, end, stream=stream)
    TypeAdapter(Rekindle).validate_python(story, extra="forbid")
    assert story["sticky_tools"] == {"change": "dropped", "tools": 9, "saved_tokens": 480}
    assert "sticky_tools" not in story_of(path, done(), stream=stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_every_wire_format_reports_reasoning_tokens_and_omitted_media(
    path: str,
    stream: bool,  # noqa: FBT001
) -> None:
    plain = done(5, n_reasoning=3)
    omitted = (OmittedMedia("image", "PNG, 8x8", 2),)
    end = replace(plain, stats=replace(plain.stats, media_omitted=omitted))
    story = story_of(path, end, stream=stream)
    TypeAdapter(Rekindle).validate_python(story, extra="forbid")
    assert story["reasoning_tokens"] == 3
    assert story["media_omitted"] == [{"kind": "image", "text": "PNG, 8x8", "count": 2}]
    assert {"reasoning_tokens", "media_omitted"}.isdisjoint(story_of(path, done(), stream=stream))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_every_wire_format_reports_drafted_tokens_by_source(
    path: str,
    stream: bool,  # noqa: FBT001
) -> None:
    drafts = DraftCounts(context=DraftCount(4, 3))
    story = story_of(path, done(drafts=drafts), stream=stream)
    TypeAdapter(Rekindle).validate_python(story, extra="forbid")
    assert story["drafts"] == [{"source": "context", "tokens": 4, "accepted": 3}]
    assert "drafts" not in story_of(path, done(), stream=stream)


def test_usage_tells_reasoning_tokens_apart() -> None:
    responder = FakeResponder((ReplyText("a"), done(5, n_reasoning=3)))
    two = chat(responder, n=2).json()["usage"]
    assert two["completion_tokens_details"] == {"reasoning_tokens": 6}
    whole = post("/v1/responses", {"input": "hi"}, responder).json()["usage"]
    assert (whole["output_tokens"], whole["output_tokens_details"]) == (5, {"reasoning_tokens": 3})


def test_what_is_written_to_the_cache_is_what_was_computed_and_kept() -> None:
    kept = done(n_prompt=10, n_cached=4).stats
    details = usage_of([kept], 1)["prompt_tokens_details"]
    assert details == {"cached_tokens": 4, "cache_write_tokens": 6}
    off = replace(done(n_prompt=10, n_cached=0).stats, is_kept=False)
    details = usage_of([off], 1)["prompt_tokens_details"]
    assert details == {"cached_tokens": 0, "cache_write_tokens": 0}


def test_the_header_has_cached_tokens_and_sources() -> None:
    spans = (CachedSpan(CacheSource.DISK, 0, 3000), CachedSpan(CacheSource.LIVE, 3000, 3980))
    warm = done(n_prompt=4012, n_cached=3980, spans=spans)
    assert cache_header_value(warm) == "hit=3980/4012 from=live,disk"
    assert cache_header_value(done(n_prompt=10, n_cached=0)) == "hit=0/10 from=-"


def test_a_stream_has_the_header_too() -> None:
    spans = Spans([CachedSpan(CacheSource.MEMORY, 0, 4)])
    first = ReplyProgress(6, 10, 4, 0.5, spans)
    reply = chat(FakeResponder((first, ReplyText("a"), done())), stream=True)
    assert reply.headers["x-rekindle-cache"] == "hit=4/10 from=memory"


ASKED = MessagesRequest(
    messages=[MessageEntry(role="user", content="hi")],
    max_tokens=1,
    diagnostics=DiagnosticsRequest(previous_message_id="msg_0"),
)
CHANGES = {
    MissReason.OTHER_MODEL: "model_changed",
    MissReason.SYSTEM_CHANGED: "system_changed",
    MissReason.TOOLS_CHANGED: "tools_changed",
    MissReason.TEXT_CHANGED: "messages_changed",
}


@pytest.mark.parametrize("reason", list(MissReason))
def test_reasons_in_anthropics_words(reason: MissReason) -> None:
    diagnostics = diagnostics_of(
        DiagnosticsRequest(previous_message_id="msg_0"), Diagnosis(replace(MISS, reason=reason))
    )
    if reason is MissReason.FIRST_REQUEST:
        assert diagnostics is None
    elif reason in CHANGES:
        changed = {"type": CHANGES[reason], "cache_missed_input_tokens": 640}
        assert diagnostics == {"cache_miss_reason": changed}
    else:
        assert diagnostics == {"cache_miss_reason": {"type": "unavailable"}}
    if diagnostics is not None:
        BetaDiagnostics.model_validate(diagnostics, strict=True)


def test_anthropics_diagnostics_are_in_whole_messages_and_where_a_stream_starts() -> None:
    named = envelope(compare_with="msg_0")
    changed = {"type": "messages_changed", "cache_missed_input_tokens": 640}
    reply = Reply((ReplyText("a"),), told(MISS))
    assert message_of(ASKED, named, [reply])["diagnostics"] == {"cache_miss_reason": changed}
    unasked = ASKED.model_copy(update={"diagnostics": None})
    assert "diagnostics" not in message_of(unasked, envelope(), [reply])

    events = MessageEvents(ASKED, named)
    assert events.encode(0, ReplyProgress(6, 10, 4, 0.5)) == b""
    start = events.encode(0, ReplyProgress(10, 10, 4, 0.5, Spans(), Diagnosis(MISS)))
    message = json.loads(start.split(b"data: ")[1])["message"]
    assert message["diagnostics"] == {"cache_miss_reason": changed}
    assert message["usage"]["cache_read_input_tokens"] == 4


def test_an_unknown_previous_message_is_reported() -> None:
    named = envelope(compare_with="msg_0")
    unknown = Reply((ReplyText("a"),), told(MISS, is_compared=False))
    missing = {"cache_miss_reason": {"type": "previous_message_not_found"}}
    assert message_of(ASKED, named, [unknown])["diagnostics"] == missing
    nothing = Reply((ReplyText("a"),), told(None))
    assert message_of(ASKED, named, [nothing])["diagnostics"] is None


@pytest.mark.parametrize(
    ("end", "diagnostics"),
    [
        (
            told(MISS),
            {"type": "cache_miss", "reason": "input_changed", "cache_missed_tokens": 640},
        ),
        (told(None), {"type": "cache_hit"}),
        (told(replace(MISS, reason=MissReason.EVICTED)), {"type": "unavailable"}),
        (told(MISS, is_compared=False), {"type": "comparison_response_not_found"}),
    ],
)
def test_diagnostics_of_a_response(end: ReplyDone, diagnostics: dict[str, Any]) -> None:
    head = ResponseHead(envelope(), CreateResponseRequest(input="hi"), toolbox_of(()))
    assert "prompt_cache_diagnostics" not in ended(head, [], end)
    body = ended(replace(head, envelope=envelope(compare_with="resp_0")), [], end)
    assert body["prompt_cache_diagnostics"] == diagnostics
    read = Response.model_validate(body).prompt_cache_diagnostics
    assert read is not None
    assert read.model_dump(exclude_unset=True) == diagnostics
