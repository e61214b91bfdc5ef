"""Media of every wire format become one line that the model can read, or the text of a file."""

import asyncio
import base64
import binascii
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.api.http.context import ApiSettings
from rekindle.api.requests.media import HEAD_BYTES, MediaReader
from rekindle.chat.conversation import Message, Role, Text, ToolResult
from rekindle.chat.reply.events import OmittedMedia
from rekindle.config.choices import MediaPolicy
from tests.api.anthropic.test_messages import CALLED, result, user
from tests.api.client import USER, client_of
from tests.api.fakes import FakeResponder, api_settings
from tests.api.requests.test_media_formats import PNG, wav
from tests.api.responses.test_responses import CALL, OUTPUT

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SEEN = "[image omitted: PNG, 1024x768; this model reads text only]"
HEARD = "[audio omitted: WAV, 0.5 s; this model reads text only]"
PDF = b"%PDF-1.4\n1 0 obj\n"
LOOKED = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
ASKED = {"role": "assistant", "tool_calls": [LOOKED]}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{b64(data)}"


def block(data: bytes, media_type: str = "image/png", type_: str = "image") -> dict[str, Any]:
    source = {"type": "base64", "media_type": media_type, "data": b64(data)}
    return {"type": type_, "source": source}


PICTURE = {"type": "image_url", "image_url": {"url": data_url(PNG), "detail": "high"}}
INPUT_IMAGE = {"type": "input_image", "image_url": data_url(PNG), "detail": "auto"}
TEXT_FILE = data_url(b"a,b\n1,2\n", "text/csv")


def send(
    path: str,
    body: dict[str, Any],
    settings: ApiSettings | None = None,
    *,
    reasoning_limit: int | None = None,
) -> tuple[httpx.Response, FakeResponder]:
    responder = FakeResponder()
    responder.reasoning_limit = reasoning_limit

    async def run() -> httpx.Response:
        async with client_of(responder, settings) as client:
            return await client.post(path, json=body)

    return asyncio.run(run()), responder


def last_message(path: str, body: dict[str, Any]) -> Message:
    reply, responder = send(path, body)
    assert reply.status_code == 200, reply.text
    return responder.conversations[0].messages[-1]


def shown(message: Message) -> str:
    [*results] = message.results
    return results[0].text if results else message.text


def chat_user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def chat_tool(*parts: Any) -> dict[str, Any]:
    tool = {"role": "tool", "tool_call_id": "c", "content": list(parts)}
    return {"messages": [USER, ASKED, tool]}


def input_user(*parts: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


def messages_of(*blocks: Any) -> dict[str, Any]:
    return {"max_tokens": 9, "messages": [user(*blocks)]}


def results_of(*blocks: Any) -> dict[str, Any]:
    return {"max_tokens": 9, "messages": [USER, CALLED, user(result(list(blocks)))]}


def file_of(url: str, name: str = "") -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": url, **({"filename": name} if name else {})}}


def omitted(kind: str, about: str) -> str:
    return f"[{kind} omitted: {about}; this model reads text only]"


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (CHAT, chat_user(PICTURE), SEEN),
        (CHAT, chat_tool(PICTURE), SEEN),
        (CHAT, chat_user({"type": "image_url", "image_url": data_url(PNG)}), SEEN),
        (CHAT, chat_user({"type": "image_url", "image_url": {"url": b64(PNG)}}), SEEN),
        (
            CHAT,
            chat_user(
                {"type": "input_audio", "input_audio": {"data": b64(wav(0.5)), "format": "wav"}}
            ),
            HEARD,
        ),
        (
            CHAT,
            chat_user({"type": "audio_url", "audio_url": {"url": data_url(wav(0.5), "audio/wav")}}),
            HEARD,
        ),
        (
            CHAT,
            chat_user(
                {"type": "video_url", "video_url": {"url": "https://v.example/a/clip.mp4?k=1"}}
            ),
            omitted("video", "clip.mp4 from v.example"),
        ),
        (
            CHAT,
            chat_user(file_of(data_url(PDF, "application/pdf"), "plan.pdf")),
            omitted("file", "plan.pdf, PDF"),
        ),
        (CHAT, chat_user(file_of(data_url(PNG, "application/octet-stream"))), SEEN),
        (CHAT, chat_user(file_of(TEXT_FILE, "t.csv")), "[file: t.csv]\na,b\n1,2\n"),
        (CHAT, chat_user(file_of(b64(b"plain words"))), "plain words"),
        (
            CHAT,
            chat_user({"type": "file", "file": {"file_id": "f-1"}}),
            omitted("file", "from a file id"),
        ),
        (
            CHAT,
            {"messages": [USER, {"role": "assistant", "audio": {"id": "audio_1"}}]},
            omitted("audio", "from a file id"),
        ),
        (RESPONSES, input_user(INPUT_IMAGE), SEEN),
        (RESPONSES, {"input": [CALL, {**OUTPUT, "output": [INPUT_IMAGE]}]}, SEEN),
        (
            RESPONSES,
            input_user({"type": "input_image", "file_id": "file-1"}),
            omitted("image", "from a file id"),
        ),
        (
            RESPONSES,
            input_user({"type": "input_file", "filename": "t.csv", "file_data": TEXT_FILE}),
            "[file: t.csv]\na,b\n1,2\n",
        ),
        (
            RESPONSES,
            {
                "input": [
                    CALL,
                    {**OUTPUT, "output": [{"type": "input_file", "file_data": TEXT_FILE}]},
                ]
            },
            "a,b\n1,2\n",
        ),
        (
            RESPONSES,
            input_user({"type": "input_file", "file_url": "https://d.example/report.pdf"}),
            omitted("file", "report.pdf from d.example"),
        ),
        (
            RESPONSES,
            {
                "input": [
                    {"type": "computer_call", "call_id": "k", "action": {"type": "screenshot"}},
                    {
                        "type": "computer_call_output",
                        "call_id": "k",
                        "output": {"type": "computer_screenshot", "image_url": data_url(PNG)},
                    },
                ]
            },
            SEEN,
        ),
        (
            RESPONSES,
            {"input": [{"type": "image_generation_call", "id": "ig_1", "result": b64(PNG)}]},
            SEEN,
        ),
        (MESSAGES, messages_of(block(PNG)), SEEN),
        (MESSAGES, results_of(block(PNG)), SEEN),
        (
            MESSAGES,
            messages_of(
                block(PDF, "application/pdf", "document") | {"title": "P/1", "context": "Old."}
            ),
            omitted("file", "P/1, PDF") + "\nOld.",
        ),
        (
            MESSAGES,
            messages_of(
                {
                    "type": "document",
                    "title": "Notes",
                    "source": {"type": "text", "media_type": "text/plain", "data": "line 1"},
                }
            ),
            "[file: Notes]\nline 1",
        ),
        (
            MESSAGES,
            results_of(
                {
                    "type": "document",
                    "source": {
                        "type": "content",
                        "content": [{"type": "text", "text": "see"}, block(PNG)],
                    },
                }
            ),
            f"see\n{SEEN}",
        ),
        (
            MESSAGES,
            messages_of(
                {"type": "image", "source": {"type": "url", "url": "http://u:p@h.example/"}}
            ),
            omitted("image", "from h.example"),
        ),
        (
            MESSAGES,
            messages_of({"type": "image", "source": {"type": "file", "file_id": "file_1"}}),
            omitted("image", "from a file id"),
        ),
        (
            MESSAGES,
            messages_of({"type": "container_upload", "file_id": "file_1"}),
            omitted("file", "from a file id"),
        ),
    ],
)
def test_media_become_text_that_the_model_can_read(
    path: str, body: dict[str, Any], text: str
) -> None:
    assert shown(last_message(path, body)) == text


def test_picture_stands_where_it_stood() -> None:
    before, after = {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
    chat = last_message(CHAT, chat_user(before, PICTURE, after))
    assert chat == Message(Role.USER, (Text("a"), Text(SEEN), Text("b")))
    assert last_message(MESSAGES, messages_of(before, block(PNG), after)) == chat
    both = {"max_tokens": 9, "messages": [USER, CALLED, user(block(PNG), result([before]))]}
    _, responder = send(MESSAGES, both)
    assert responder.conversations[0].messages[2:] == (
        Message(Role.TOOL, (ToolResult("toolu_1", None, "a"),)),
        Message(Role.USER, (Text(SEEN),)),
    )


def test_a_mark_behind_a_picture_covers_its_message() -> None:
    marked = block(PNG) | {"cache_control": {"type": "ephemeral"}}
    body = {"max_tokens": 9, "messages": [USER, CALLED, user(result("4"), marked), USER]}
    reply, responder = send(MESSAGES, body)
    assert reply.status_code == 200
    [pin] = responder.started[0].options.terms.pins
    prompt = responder.started[0].prompt.text
    assert prompt[: pin.n_tokens].endswith(SEEN)


READER_PARTS: dict[str, Any] = {
    "bad base64": {"type": "image", "source": {"type": "base64", "data": "\u00e9!"}},
    "nothing": {"type": "image_url"},
    "an empty URL": {"type": "image_url", "image_url": {"url": ""}},
    "a number": {"type": "image_url", "image_url": 5},
    "a list": {"type": "input_image", "image_url": ["a"]},
    "a bad URL": {"type": "image_url", "image_url": {"url": "http://[::1"}},
    "a file without data": {"type": "file", "file": {}},
    "an empty file": file_of("data:text/plain;base64,"),
}


@pytest.mark.parametrize("name", READER_PARTS)
def test_broken_media_are_one_line_all_the_same(name: str) -> None:
    text = MediaReader(MediaPolicy.TEXT).text_of(READER_PARTS[name])
    assert text is not None
    assert text.startswith("[")
    assert text.endswith("; this model reads text only]")
    assert "\n" not in text


def test_the_same_bytes_are_the_same_line_however_they_are_sent() -> None:
    wrapped = base64.encodebytes(PNG * 20).decode()
    parts = [
        PICTURE,
        block(PNG),
        block(PNG, "image/jpeg"),
        {"type": "image", "source": {"type": "base64", "data": wrapped}},
        {"type": "image", "data": b64(PNG), "mimeType": "image/png"},
        {"type": "image", "base64": b64(PNG * 9000)},
        {"type": "image_url", "image_url": data_url(PNG).rstrip("=")},
        {"type": "image_url", "image_url": f"DATA:image/png;BASE64,{b64(PNG)}"},
        {"type": "input_image", "image_url": data_url(PNG), "detail": "low", "id": "x"},
    ]
    reader = MediaReader(MediaPolicy.TEXT)
    assert {reader.text_of(part) for part in parts} == {SEEN}
    assert reader.omitted == (OmittedMedia("image", "PNG, 1024x768", len(parts)),)


def test_a_signed_url_is_the_same_line_in_every_request() -> None:
    reader = MediaReader(MediaPolicy.TEXT)
    urls = [f"https://s3.example/b/a.png?signature={sign}#top" for sign in ("x", "y")]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    assert {reader.text_of(part) for part in parts} == {omitted("image", "a.png from s3.example")}


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = st.sampled_from(
    [
        "image_url",
        "source",
        "file",
        "data",
        "url",
        "file_data",
        "title",
        "context",
        "content",
        "format",
    ]
)
TYPES = st.sampled_from(["image", "image_url", "document", "file", "input_audio", "video_url"])


@given(TYPES, st.dictionaries(KEYS, JSON_VALUES | st.dictionaries(KEYS, JSON_VALUES)))
def test_any_json_under_a_media_type_is_text(type_: str, fields: dict[str, Any]) -> None:
    text = MediaReader(MediaPolicy.TEXT).text_of({**fields, "type": type_})
    assert text
    json.dumps(text).encode()


@given(st.sampled_from(["", "data:", "data:image/png;base64,", "data:text/plain,"]), st.binary())
def test_any_bytes_are_text(prefix: str, data: bytes) -> None:
    for payload in (b64(data), data.decode("latin-1")):
        for part in (
            file_of(prefix + payload),
            {"type": "image_url", "image_url": prefix + payload},
        ):
            assert MediaReader(MediaPolicy.TEXT).text_of(part)


BINARY = b"\xff\xfe\x9c\xe1"


@pytest.mark.parametrize(
    "data",
    [
        b"words\0" * 9,
        BINARY,
        BINARY * 100_000,
        b"#!/bin/sh\n" * 50_000 + BINARY * 200_000,
        b"#!/bin/sh\n" * 50_000 + b"\0",
    ],
    ids=["NUL", "short", "long", "binary tail", "NUL at the end"],
)
def test_a_binary_file_that_claims_to_be_text_is_one_line(data: bytes) -> None:
    reader = MediaReader(MediaPolicy.TEXT)
    assert reader.text_of(file_of(data_url(data, "text/plain"))) == omitted("file", "PLAIN")


def test_a_text_file_may_have_a_few_unreadable_characters() -> None:
    reader = MediaReader(MediaPolicy.TEXT)
    line = "Gr\u00fc\u00dfe aus K\u00f6ln am Rhein, wo die Sonne scheint.\n"
    text = reader.text_of(file_of(data_url(line.encode("latin-1") * 5000, "text/plain")))
    assert text == "".join(c if c.isascii() else "\ufffd" for c in line) * 5000


@pytest.mark.parametrize("media_type", ["text/plain", "application/octet-stream"])
def test_the_head_of_a_binary_file_is_enough(
    media_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    decode = binascii.a2b_base64

    def noted(digits: str) -> bytes:
        sizes.append(len(digits))
        return decode(digits)

    monkeypatch.setattr(binascii, "a2b_base64", noted)
    MediaReader(MediaPolicy.TEXT).text_of(file_of(data_url(BINARY * 500_000, media_type)))
    assert max(sizes) < 2 * HEAD_BYTES


def test_a_long_text_file_is_whole() -> None:
    text = "\u20ac" * 200_000  # the head ends within a character
    for media_type in ("text/plain", "application/octet-stream"):
        part = file_of(data_url(text.encode(), media_type))
        assert MediaReader(MediaPolicy.TEXT).text_of(part) == text


def test_reply_names_what_the_model_did_not_see() -> None:
    body = chat_user(PICTURE, PICTURE, file_of(data_url(PDF)), file_of(TEXT_FILE))
    _, responder = send(CHAT, body)
    assert responder.started[0].options.media_omitted == (
        OmittedMedia("image", "PNG, 1024x768", 2),
        OmittedMedia("file", "PDF", 1),
    )


@pytest.mark.anyio
async def test_media_are_counted_by_kind_and_only_where_a_reply_is_made() -> None:
    async with client_of(FakeResponder()) as client:
        await client.post(CHAT, json=chat_user(PICTURE, PICTURE))
        await client.post("/v1/cache/lookup", json=chat_user(PICTURE))
        metrics = (await client.get("/metrics")).text
    assert 'rekindle_media_omitted_total{kind="image"} 2.0' in metrics
    assert 'rekindle_media_omitted_total{kind="audio"} 0.0' in metrics
    assert 'field="messages.content.image_url"' not in metrics


def test_counting_rendering_and_looking_up_read_the_same_prompt() -> None:
    for path, body, others in (
        (CHAT, chat_user(PICTURE), ["/apply-template", "/v1/cache/lookup"]),
        (MESSAGES, messages_of(block(PNG)), ["/v1/messages/count_tokens", "/v1/cache/lookup"]),
        (RESPONSES, input_user(INPUT_IMAGE), ["/v1/cache/lookup"]),
    ):
        _, replied = send(path, body)
        for other in others:
            reply, responder = send(other, body)
            assert reply.status_code == 200, reply.text
            assert responder.conversations == replied.conversations


def test_a_stored_response_with_a_picture_is_continued_and_lists_it_as_sent() -> None:
    responder = FakeResponder()

    async def run() -> tuple[httpx.Response, httpx.Response]:
        async with client_of(responder) as client:
            first = await client.post(RESPONSES, json=input_user(INPUT_IMAGE))
            id = first.json()["id"]
            more = {"input": "And now?", "previous_response_id": id}
            second = await client.post(RESPONSES, json=more)
            return second, await client.get(f"{RESPONSES}/{id}/input_items")

    second, items = asyncio.run(run())
    assert second.status_code == 200
    assert responder.conversations[1].messages[0] == Message(Role.USER, (Text(SEEN),))
    assert items.json()["data"][0]["content"] == [INPUT_IMAGE]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat_user(PICTURE), "messages.0.content.0.type"),
        (CHAT, chat_tool(PICTURE), "messages.2.content.0.type"),
        (
            CHAT,
            {"messages": [USER, {"role": "assistant", "audio": {"id": "a"}}]},
            "messages.1.audio",
        ),
        (CHAT, chat_user(file_of(TEXT_FILE)), "messages.0.content.0.type"),
        (RESPONSES, input_user(INPUT_IMAGE), "input.0.content.0.type"),
        (MESSAGES, messages_of(block(PNG)), "messages.0.content.0.type"),
        (MESSAGES, results_of(block(PNG)), "messages.2.content.0.content.0.type"),
        ("/v1/messages/count_tokens", messages_of(block(PNG)), "messages.0.content.0.type"),
        ("/v1/cache/lookup", messages_of(block(PNG)), "messages.0.content.0.type"),
        ("/apply-template", chat_user(PICTURE), "messages.0.content.0.type"),
    ],
)
def test_media_are_refused_where_the_server_is_set_to(
    path: str, body: dict[str, Any], param: str
) -> None:
    reply, responder = send(path, body, api_settings(media=MediaPolicy.ERROR))
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert f"`{param}`" in error["message"]
    assert not responder.started
