"""What Gemini's clients send becomes the same conversation as everybody else's."""

import json
from typing import Any

import pytest

from rekindle.api.gemini.contents import read_contents
from rekindle.api.gemini.schema import CountedRequest
from rekindle.api.requests.media import MediaReader
from rekindle.chat.conversation import Conversation, Role
from rekindle.config.choices import MediaPolicy
from rekindle.errors import InvalidRequest

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
    "rkJggg=="
)
ASK = {"role": "user", "parts": [{"text": "hi"}]}


def conversation(**fields: Any) -> Conversation:
    body = CountedRequest.model_validate({"contents": [ASK], **fields})
    return read_contents(body, MediaReader(MediaPolicy.TEXT)).conversation


def model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def call(name: str, **fields: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {}, **fields}}


def answer(name: str, value: Any, **fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": value, **fields}}


def answers(found: Conversation) -> list[tuple[str, str]]:
    results = [each for message in found.messages for each in message.results]
    return [(each.call_id, each.text) for each in results]


def test_both_spellings_of_a_field_are_one_field() -> None:
    camel = {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {}}]}],
        "generationConfig": {"thinkingConfig": {"thinkingLevel": "HIGH"}},
    }
    snake = {
        "system_instruction": {"parts": {"text": "Be brief."}},
        "tools": {"function_declarations": {"name": "f", "parameters_json_schema": {}}},
        "generation_config": {"thinking_config": {"thinking_level": "HIGH"}},
    }
    assert conversation(**camel) == conversation(**snake)
    assert conversation(**camel).template_kwargs == {"reasoning_effort": "high"}


def test_chunks_of_a_streamed_reply_are_one_turn() -> None:
    """Google's SDKs keep each chunk of a stream as a content of its own."""
    chunks = [
        model({"text": "Let me", "thought": True}),
        model({"text": " see.", "thought": True, "thoughtSignature": "c2ln"}),
        model({"text": "Rea"}),
        model({"text": "ding."}),
        model(call("read", id="call_1", args={"path": "caf\u00e9"})),
        model({"text": ""}),
    ]
    found = conversation(contents=[ASK, *chunks, user({"text": "again"})]).messages
    assert [message.role for message in found] == [Role.USER, Role.ASSISTANT, Role.USER]
    assert (found[1].reasoning, found[1].text) == ("Let me see.", "Reading.")
    [read] = found[1].calls
    assert (read.id, json.loads(read.arguments_json)) == ("call_1", {"path": "caf\u00e9"})


def test_responses_without_ids_answer_the_calls_of_their_name_in_order() -> None:
    """So gemini-cli sends them, with the calls' own ids left out."""
    contents = [
        ASK,
        model(
            {"text": "I write."},
            {**call("write", id="call_a"), "thoughtSignature": "skip_thought_signature_validator"},
            call("read", id="call_b"),
            call("write", id="call_c"),
        ),
        user(
            answer("write", {"output": "first"}),
            answer("write", {"output": "second"}),
            answer("read", {"output": "third"}),
        ),
    ]
    assert answers(conversation(contents=contents)) == [
        ("call_a", "first"),
        ("call_c", "second"),
        ("call_b", "third"),
    ]


def test_calls_without_ids_get_numbers_that_stay() -> None:
    first = [ASK, model(call("f")), user(answer("f", {"result": 1}))]
    later = [*first, model(call("f"), call("g")), user(answer("g", {}), answer("f", {"a": [1]}))]
    early = conversation(contents=first).messages
    found = conversation(contents=later)
    assert found.messages[: len(early)] == early
    ids = [call.id for message in found.messages for call in message.calls]
    assert ids == ["call_1", "call_2", "call_3"]
    assert answers(found) == [
        ("call_1", "1"),
        ("call_3", ""),
        ("call_2", '{"a": [1]}'),
    ]


def test_an_id_counts_more_than_the_order() -> None:
    contents = [
        ASK,
        model(call("f", id="one"), call("f", id="two")),
        {"role": "function", "parts": [answer("f", {"output": "b"}, id="two")]},
        {"role": "tool", "parts": [answer("f", {"error": "bad"}, id="write__one")]},
    ]
    assert answers(conversation(contents=contents)) == [
        ("two", "b"),
        ("one", '{"error": "bad"}'),
    ]


def test_a_response_to_no_call_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="no earlier call of `f`") as refusal:
        conversation(contents=[user({"text": "x"}, answer("f", {}))])
    assert refusal.value.param == "contents.0.parts.1.functionResponse"


def test_media_become_text() -> None:
    parts = [
        {"inlineData": {"mimeType": "image/png", "data": PIXEL}},
        {"inline_data": {"mime_type": "text/plain", "data": "aGVsbG8=", "display_name": "a.txt"}},
        {"fileData": {"mimeType": "audio/mp3", "fileUri": "files/abc"}},
        {"fileData": {"mimeType": "video/mp4", "fileUri": "https://example.com/a/film.mp4?sig=1"}},
        {"executableCode": {"language": "PYTHON", "code": "print(1)"}},
        {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "1"}},
    ]
    [message] = conversation(contents={"parts": parts}).messages
    assert message.text.split("\n") == [
        "[image omitted: PNG, 1x1; this model reads text only]",
        "[file: a.txt]",
        "hello",
        "[audio omitted: from a file id; this model reads text only]",
        "[video omitted: film.mp4 from example.com; this model reads text only]",
        "print(1)",
        "1",
    ]


def test_media_of_a_response_follow_its_text() -> None:
    picture = {"inlineData": {"mimeType": "image/png", "data": PIXEL}}
    contents = [ASK, model(call("look")), user(answer("look", {"output": "see:"}, parts=[picture]))]
    *_, message = conversation(contents=contents).messages
    [result] = message.results
    assert result.text == "see:\n[image omitted: PNG, 1x1; this model reads text only]"


def test_text_of_the_model_at_the_end_is_continued() -> None:
    assert conversation(contents=[ASK, model({"text": "Once"})]).continue_last
    assert not conversation(contents=[ASK, model(call("f"))]).continue_last


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"contents": []}, "contents"),
        ({"contents": [model(call(""))]}, "contents.0.parts.0.functionCall.name"),
        (
            {"tools": [{"functionDeclarations": [{"name": "f"}, {"name": "f"}]}]},
            "tools.0.functionDeclarations.1.name",
        ),
    ],
)
def test_faults_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        conversation(**fields)
    assert refusal.value.param == param
