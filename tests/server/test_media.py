"""Pictures and files from the official SDKs, read by the real server with the embedded model."""

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.api.requests.test_media import PDF, SEEN, block, data_url
from tests.api.requests.test_media_formats import PNG
from tests.support.server_process import ServerProcess, serve

PICTURE: Any = {"type": "image_url", "image_url": {"url": data_url(PNG)}}
TEXT: Any = {"type": "text", "text": "What do you see?"}
OMITTED = [{"kind": "image", "text": "PNG, 1024x768", "count": 1}]
SETTINGS: dict[str, Any] = {"model": "any", "temperature": 0}


@pytest.fixture(scope="module")
def sdk(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def story(reply: Any) -> dict[str, Any]:
    found: dict[str, Any] = reply.model_extra["rekindle"]
    return found


def test_a_session_goes_on_after_a_picture_and_finds_it_in_the_cache(
    client: openai.OpenAI,
) -> None:
    asked: list[Any] = [{"role": "user", "content": [TEXT, PICTURE]}]
    first = client.chat.completions.create(messages=asked, max_tokens=8, **SETTINGS)
    assert story(first)["media_omitted"] == OMITTED
    assert first.usage is not None
    said = {"role": "assistant", "content": first.choices[0].message.content}
    more = [*asked, said, {"role": "user", "content": "And now?"}]
    second = client.chat.completions.create(messages=more, max_tokens=8, **SETTINGS)
    assert story(second)["media_omitted"] == OMITTED
    assert second.usage is not None
    details = second.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens is not None
    assert details.cached_tokens >= first.usage.prompt_tokens


def test_model_reads_the_line_and_the_text_of_a_file(server: ServerProcess) -> None:
    file = {"filename": "a.txt", "file_data": data_url(b"Red is a colour.", "text/plain")}
    body = {"messages": [{"role": "user", "content": [PICTURE, {"type": "file", "file": file}]}]}
    prompt = httpx.post(f"{server.url}/apply-template", json=body).json()["prompt"]
    assert f"{SEEN}\n[file: a.txt]\nRed is a colour." in prompt


def test_responses_read_pictures_from_users_and_tools_and_from_stored_responses(
    client: openai.OpenAI,
) -> None:
    image: Any = {"type": "input_image", "image_url": data_url(PNG), "detail": "auto"}
    asked: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}, image]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [image]},
    ]
    first = client.responses.create(input=asked, max_output_tokens=8, **SETTINGS)
    assert story(first)["media_omitted"] == [{**OMITTED[0], "count": 2}]
    second = client.responses.create(
        input="And?", previous_response_id=first.id, max_output_tokens=8, **SETTINGS
    )
    assert story(second)["media_omitted"] == [{**OMITTED[0], "count": 2}]
    items = client.responses.input_items.list(first.id, order="asc").data
    assert items[0].to_dict()["content"] == asked[0]["content"]


def test_messages_read_pictures_and_documents_and_count_their_tokens(
    sdk: anthropic.Anthropic,
) -> None:
    document = block(PDF, "application/pdf", "document") | {"title": "plan.pdf"}
    asked: list[Any] = [{"role": "user", "content": [block(PNG), document, TEXT]}]
    whole = sdk.messages.create(model="any", max_tokens=8, messages=asked)
    assert story(whole)["media_omitted"] == [
        *OMITTED,
        {"kind": "file", "text": "plan.pdf, PDF", "count": 1},
    ]
    counted = sdk.messages.count_tokens(model="any", messages=asked)
    usage = whole.usage
    created, read = usage.cache_creation_input_tokens, usage.cache_read_input_tokens
    assert counted.input_tokens == usage.input_tokens + (created or 0) + (read or 0)


def test_a_budget_is_taken_from_every_sdk(client: openai.OpenAI, sdk: anthropic.Anthropic) -> None:
    asked: list[Any] = [{"role": "user", "content": "Name three colours."}]
    chat = client.chat.completions.create(
        messages=asked, max_tokens=8, extra_body={"reasoning_budget": 16}, **SETTINGS
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens_details is not None
    assert chat.usage.completion_tokens_details.reasoning_tokens == 0
    response = client.responses.create(
        input="Name three colours.",
        max_output_tokens=8,
        extra_body={"reasoning": {"max_tokens": 16}},
        **SETTINGS,
    )
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    assert sdk.messages.create(model="any", max_tokens=8, messages=asked, thinking=thinking).content


@pytest.mark.usefixtures("embedded_model")
def test_media_are_refused_by_a_setting() -> None:
    with serve("--media", "error") as server:
        url = f"{server.url}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": [TEXT, PICTURE]}], "max_tokens": 4}
        reply = httpx.post(url, json=body, timeout=60)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "messages.0.content.1.type"
