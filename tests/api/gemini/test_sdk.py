"""Google's own client reads what we write."""

from collections.abc import Iterator

import pytest
from google import genai
from google.genai import errors, types

from rekindle.chat.reply.events import FinishReason, ReplyProgress, ReplyReasoning, ReplyText
from rekindle.errors import DecodeFailed, Overloaded, PromptTooLong
from tests.api.client import serving
from tests.api.fakes import HELLO, FakeResponder, Script, Wait, api_settings, calling, done
from tests.api.openai.test_sdk import ARGUMENTS, Replay

EVALUATED = ReplyProgress(10, 10, 4, 0.5)
CALLING: Script = (
    EVALUATED,
    ReplyReasoning("Let me"),
    ReplyReasoning(" see."),
    ReplyText("Writ"),
    ReplyText("ing."),
    *calling(0, "call_1", "write", ARGUMENTS),
    *calling(1, "call_2", "now", "{}"),
    done(7, finish=FinishReason.TOOL_CALLS, n_reasoning=3),
)
THINKING = types.GenerateContentConfig(
    thinking_config=types.ThinkingConfig(include_thoughts=True, thinking_budget=512)
)


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay()


@pytest.fixture(scope="module")
def responder(replay: Replay) -> FakeResponder:
    return FakeResponder(lambda _: replay.script)


@pytest.fixture(scope="module")
def client(responder: FakeResponder) -> Iterator[genai.Client]:
    with serving(responder, api_settings(ping_seconds=0.01)) as url:
        yield client_at(url)


def client_at(url: str) -> genai.Client:
    options = types.HttpOptions(base_url=url, retry_options=types.HttpRetryOptions(attempts=1))
    return genai.Client(api_key="none", http_options=options)


def test_whole_reply(client: genai.Client, replay: Replay) -> None:
    replay.script = CALLING
    reply = client.models.generate_content(model="any", contents="hi", config=THINKING)
    assert reply.candidates is not None
    assert reply.candidates[0].content is not None
    thought, text, write, now = reply.candidates[0].content.parts or []
    assert (thought.text, thought.thought) == ("Let me see.", True)
    assert (text.text, text.thought) == ("Writing.", None)
    check_calls([write.function_call, now.function_call])
    assert reply.candidates[0].finish_reason is types.FinishReason.STOP
    check_usage(reply.usage_metadata)
    assert reply.model_version == "tiny"


def test_stream_has_the_same_parts(client: genai.Client, replay: Replay) -> None:
    replay.script = CALLING
    chunks = list(
        client.models.generate_content_stream(model="any", contents="hi", config=THINKING)
    )
    parts = [part for chunk in chunks for part in chunk.parts or ()]
    assert "".join(part.text or "" for part in parts if part.thought) == "Let me see."
    assert "".join(part.text or "" for part in parts if not part.thought) == "Writing."
    check_calls([part.function_call for part in parts if part.function_call])
    check_usage(chunks[-1].usage_metadata)
    assert len({chunk.response_id for chunk in chunks}) == 1


def test_thoughts_are_hidden_unless_the_client_wants_them(
    client: genai.Client, replay: Replay
) -> None:
    replay.script = CALLING
    reply = client.models.generate_content(model="any", contents="hi")
    assert not [part for part in reply.parts or () if part.thought]
    chunks = list(client.models.generate_content_stream(model="any", contents="hi"))
    assert not [part for chunk in chunks for part in chunk.parts or () if part.thought]


def test_keep_alives_are_no_data(client: genai.Client, replay: Replay) -> None:
    replay.script = (Wait(0.05), EVALUATED, ReplyText("Hel"), Wait(0.05), ReplyText("lo"), done())
    chunks = client.models.generate_content_stream(model="any", contents="hi")
    assert "".join(chunk.text or "" for chunk in chunks) == "Hello"


def test_a_streamed_turn_returns_as_one_message(
    client: genai.Client, replay: Replay, responder: FakeResponder
) -> None:
    replay.script = HELLO
    chat = client.chats.create(model="any")
    list(chat.send_message_stream("hi"))
    list(chat.send_message_stream("again"))
    roles = [(each.role.value, each.text) for each in responder.conversations[-1].messages]
    assert roles == [("user", "hi"), ("assistant", "Hello"), ("user", "again")]


def test_functions_are_called_automatically(
    client: genai.Client, replay: Replay, responder: FakeResponder
) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        replay.script = HELLO
        return a + b

    replay.script = (*calling(0, "call_7", "add", '{"a": 2, "b": 3}'), done())
    config = types.GenerateContentConfig(tools=[add], top_k=40, temperature=0.5)
    reply = client.models.generate_content(model="any", contents="2+3?", config=config)
    assert reply.text == "Hello"
    asked, call, result = responder.conversations[-1].messages
    assert asked.text == "2+3?"
    assert [(each.id, each.name) for each in call.calls] == [("call_7", "add")]
    assert [(each.call_id, each.text) for each in result.results] == [("call_7", "5")]
    assert responder.started[-1].options.sampling.top_k == 40


def test_tokens_are_counted(client: genai.Client) -> None:
    assert client.models.count_tokens(model="any", contents="hi").total_tokens == 8


def test_models_are_listed(client: genai.Client) -> None:
    [model] = client.models.list()
    assert (model.name, model.input_token_limit) == ("models/tiny", 512)
    assert client.models.get(model="tiny").name == "models/tiny"


def test_texts_are_embedded(client: genai.Client, replay: Replay) -> None:
    replay.script = HELLO
    reply = client.models.embed_content(
        model="any",
        contents=["a", "b"],
        config=types.EmbedContentConfig(output_dimensionality=2),
    )
    first, second = reply.embeddings or []
    assert first.values == pytest.approx([0.6, 0.8])
    assert second.values == pytest.approx([0.6, 0.8])


def test_a_cached_content_is_continued(
    client: genai.Client, replay: Replay, responder: FakeResponder
) -> None:
    replay.script = (done(0, finish=FinishReason.LENGTH),)
    kept = client.caches.create(
        model="any",
        config=types.CreateCachedContentConfig(
            contents=["The book."], system_instruction="Be brief.", ttl="300s", display_name="b"
        ),
    )
    assert kept.name is not None
    replay.script = HELLO
    config = types.GenerateContentConfig(cached_content=kept.name)
    client.models.generate_content(model="any", contents="Who?", config=config)
    texts = [(each.role.value, each.text) for each in responder.conversations[-1].messages]
    assert texts == [("system", "Be brief."), ("user", "The book."), ("user", "Who?")]
    assert client.caches.get(name=kept.name).display_name == "b"
    longer = client.caches.update(
        name=kept.name, config=types.UpdateCachedContentConfig(ttl="900s")
    )
    assert longer.expire_time is not None
    assert kept.expire_time is not None
    assert longer.expire_time > kept.expire_time
    client.caches.create(model="any", config=types.CreateCachedContentConfig(contents=["Another."]))
    pager = client.caches.list(config=types.ListCachedContentsConfig(page_size=1))
    assert sorted(each.display_name or "" for each in pager) == ["", "b"]
    client.caches.delete(name=kept.name)
    with pytest.raises(errors.ClientError) as gone:
        client.models.generate_content(model="any", contents="Who?", config=config)
    assert (gone.value.code, gone.value.status) == (404, "NOT_FOUND")


def test_failure_in_a_stream_is_raised(client: genai.Client, replay: Replay) -> None:
    replay.script = (EVALUATED, ReplyText("a"), DecodeFailed("llama.cpp ran out of memory."))
    with pytest.raises(errors.APIError, match="ran out of memory"):
        list(client.models.generate_content_stream(model="any", contents="hi"))


def test_refusals_have_googles_names(client: genai.Client, replay: Replay) -> None:
    replay.script = (Overloaded("Full.", retry_after_seconds=1),)
    with pytest.raises(errors.ClientError) as refusal:
        client.models.generate_content(model="any", contents="hi")
    assert (refusal.value.code, refusal.value.status) == (429, "RESOURCE_EXHAUSTED")
    replay.script = (PromptTooLong(n_prompt=600, n_ctx=512),)
    with pytest.raises(errors.ClientError, match=r"input token count \(600\) exceeds") as refused:
        client.models.generate_content(model="any", contents="hi")
    assert refused.value.status == "INVALID_ARGUMENT"


def check_calls(calls: list[types.FunctionCall | None]) -> None:
    write, now = calls
    assert write is not None
    assert (write.id, write.name) == ("call_1", "write")
    assert write.args == {"text": "caf\u00e9 \U0001f600\u2028" * 1000, "n": 1}
    assert now is not None
    assert (now.id, now.name, now.args) == ("call_2", "now", {})


def check_usage(usage: types.GenerateContentResponseUsageMetadata | None) -> None:
    assert usage is not None
    assert (usage.prompt_token_count, usage.cached_content_token_count) == (10, 4)
    assert (usage.candidates_token_count, usage.thoughts_token_count) == (4, 3)
    assert usage.total_token_count == 17
