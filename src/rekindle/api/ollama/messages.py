"""Conversion of Ollama's messages to a neutral `Conversation`."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rekindle.api.body import fault
from rekindle.api.content import ROLES, assistant_message
from rekindle.api.ollama.schema import (
    OllamaCall,
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaMessage,
)
from rekindle.api.openai.tools import tools_of
from rekindle.api.requests.media import MediaReader
from rekindle.api.requests.reasoning import SWITCH
from rekindle.api.tools import CallIds, OpenCalls
from rekindle.chat.conversation import Conversation, Message, Role, Text, ToolCall, ToolResult


def chat_conversation(body: OllamaChatRequest, media: MediaReader) -> Conversation:
    if not body.messages:
        raise fault("messages", " must not be empty.")
    messages = tuple(_OllamaReader(media).read(body.messages))
    return Conversation(
        messages=messages,
        tools=tools_of(body.tools or ()),
        template_kwargs=_template_kwargs(body),
        continue_last=_is_open(messages[-1]),
    )


def generate_conversation(body: OllamaGenerateRequest, media: MediaReader) -> Conversation:
    if body.is_empty:
        raise fault("prompt", " must not be empty.")
    system = [Message(Role.SYSTEM, (Text(body.system),))] if body.system else []
    texts = [*_images(body.images, "images", media), body.prompt or ""]
    user = Message(Role.USER, tuple(Text(text) for text in texts if text))
    return Conversation(messages=(*system, user), template_kwargs=_template_kwargs(body))


def reasoning_budget_of(body: OllamaFields) -> int | None:
    return 0 if body.think is False else None


def _template_kwargs(body: OllamaFields) -> dict[str, Any]:
    if not body.think:  # a budget of 0 turns thinking off
        return {}
    effort = {} if body.think is True else {"reasoning_effort": body.think}
    return {SWITCH: True, **effort}


def _is_open(last: Message) -> bool:
    """Return whether the reply continues the last message, as Ollama does it."""
    return last.role is Role.ASSISTANT and bool(last.text) and not last.calls


class _OllamaReader:
    """Reads the messages of one request. Results without an id answer calls in their order."""

    def __init__(self, media: MediaReader) -> None:
        self._media = media
        self._ids = CallIds()
        self._n_calls = 0
        self._open = OpenCalls()

    def read(self, entries: Sequence[OllamaMessage]) -> Iterator[Message]:
        for index, entry in enumerate(entries):
            path = f"messages.{index}"
            texts = [*_images(entry.images, f"{path}.images", self._media), entry.content or ""]
            text = "\n".join(text for text in texts if text)
            if entry.role == "tool":
                yield Message(Role.TOOL, (self._result(entry, text, path),))
            elif entry.role == "assistant":
                calls = [self._call(call) for call in entry.tool_calls or ()]
                self._ids.add([call.id for call in calls])
                if calls:
                    self._open.begin(calls)
                yield assistant_message(entry.thinking or "", text, calls)
            else:
                parts = (Text(text),) if text else ()
                yield Message(ROLES[entry.role], parts, name=entry.name)

    def _call(self, call: OllamaCall) -> ToolCall:
        self._n_calls += 1
        arguments = call.function.arguments
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        return ToolCall(call.id or f"call_{self._n_calls}", call.function.name, arguments)

    def _result(self, entry: OllamaMessage, text: str, path: str) -> ToolResult:
        name = entry.tool_name or entry.name
        if entry.tool_call_id:
            call_id = self._ids.resolve(entry.tool_call_id, f"{path}.tool_call_id")
            answered = self._open.answer(call_id)
        else:
            answered = self._open.answer_named(name) or self._open.answer_first()
            call_id = answered.id if answered else ""
        return ToolResult(call_id, name or (answered.name if answered else None), text)


def _images(images: Sequence[str] | None, path: str, media: MediaReader) -> Iterator[str]:
    for index, image in enumerate(images or ()):
        if (text := media.text_of({"type": "image", "data": image})) is None:
            raise fault(f"{path}.{index}", " is not supported. Send text.")
        yield text
