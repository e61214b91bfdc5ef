"""Chat completions and completions as wire formats."""

from collections.abc import Mapping
from functools import partial

from rekindle.api.cache_controls import openai_marks
from rekindle.api.http.caller import Caller
from rekindle.api.openai.bodies import ChatCompletion, ChatCompletionChunk, Completion
from rekindle.api.openai.messages import conversation_of, marks_of, reasoning_budget_of
from rekindle.api.openai.request import chat_options, completion_options, completion_prompts
from rekindle.api.openai.response import chat_completion, completion
from rekindle.api.openai.schema import ChatCompletionRequest, CompletionRequest
from rekindle.api.openai.stream import chat_chunks, completion_chunks
from rekindle.api.pipeline import Exchange, WireFormat
from rekindle.api.requests.media import MediaReader
from rekindle.config.choices import Overflow


def _read_chat(
    body: ChatCompletionRequest, _: Caller, __: Mapping[str, str], media: MediaReader
) -> Exchange:
    conversation = conversation_of(body, media)
    return Exchange(
        prompt=conversation,
        marks=marks_of(body, conversation),
        adapters=body.lora or (),
        overflow=Overflow(body.overflow) if body.overflow else None,
        media_omitted=media.omitted,
        reasoning_budget=reasoning_budget_of(body),
        n_per_prompt=body.n or 1,
        options=partial(chat_options, body, conversation.tools),
        encoder=partial(chat_chunks, body),
        whole=partial(chat_completion, body),
    )


def _read_completion(
    body: CompletionRequest, _: Caller, __: Mapping[str, str], ___: MediaReader
) -> Exchange:
    return Exchange(
        prompt=completion_prompts(body),
        marks=openai_marks(body, ()),
        adapters=body.lora or (),
        n_per_prompt=body.n or 1,
        options=partial(completion_options, body),
        encoder=partial(completion_chunks, body),
        whole=partial(completion, body),
    )


# llama-server serves each path with and without the prefix.
CHAT = WireFormat(
    name="chat",
    operation="chat_completions",
    paths=("/v1/chat/completions", "/chat/completions"),
    schema=ChatCompletionRequest,
    body=ChatCompletion,
    event=ChatCompletionChunk,
    id_prefix="chatcmpl-",
    read=_read_chat,
)
COMPLETIONS = WireFormat(
    name="completions",
    operation="completions",
    paths=("/v1/completions", "/completions"),
    schema=CompletionRequest,
    body=Completion,
    event=Completion,
    id_prefix="cmpl-",
    read=_read_completion,
)
