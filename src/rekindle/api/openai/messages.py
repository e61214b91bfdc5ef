"""Conversion of chat messages to a neutral `Conversation`."""

import json
from collections.abc import Iterator, Sequence

from rekindle.api.body import fault
from rekindle.api.cache_controls import Mark, covered, openai_marks
from rekindle.api.content import ROLES, part_text
from rekindle.api.openai.schema import (
    ChatCompletionRequest,
    ChatMessage,
    ChatReasoning,
    ToolCallEntry,
)
from rekindle.api.openai.tools import tools_of
from rekindle.api.requests.media import MediaReader
from rekindle.api.requests.reasoning import NO_EFFORT, limit_of
from rekindle.api.tools import CallIds
from rekindle.chat.conversation import (
    Conversation,
    Message,
    Part,
    Reasoning,
    Text,
    ToolCall,
    ToolResult,
)


def conversation_of(body: ChatCompletionRequest, media: MediaReader) -> Conversation:
    reasoning = body.reasoning or ChatReasoning()
    kwargs = {
        "enable_thinking": body.enable_thinking,
        "reasoning_effort": body.reasoning_effort or reasoning.effort,
    }
    given = {name: value for name, value in kwargs.items() if value is not None}
    return Conversation(
        messages=_messages(body.messages, media),
        tools=tools_of(body.tools or ()),
        documents_json=tuple(
            json.dumps(document, ensure_ascii=False) for document in body.documents or ()
        ),
        template_kwargs=given | (body.chat_template_kwargs or {}),
        continue_last=_continues_last(body),
    )


def reasoning_budget_of(body: ChatCompletionRequest) -> int | None:
    """Return the budget that the client asks for, under any of its names. None: none."""
    reasoning = body.reasoning or ChatReasoning()
    if reasoning.enabled is False or NO_EFFORT in (body.reasoning_effort, reasoning.effort):
        return 0
    names = (body.reasoning_budget, body.reasoning_budget_tokens, body.thinking_budget_tokens)
    given = (limit_of(each) for each in (*names, reasoning.max_tokens))
    return next((each for each in given if each is not None), None)


def marks_of(body: ChatCompletionRequest, conversation: Conversation) -> tuple[Mark, ...]:
    breakpoints = [
        covered(conversation, index + 1)
        for index, entry in enumerate(body.messages)
        for part in (entry.content if isinstance(entry.content, list) else ())
        if part.prompt_cache_breakpoint is not None
    ]
    return openai_marks(body, breakpoints)


def _messages(entries: Sequence[ChatMessage], media: MediaReader) -> tuple[Message, ...]:
    calls = CallIds()
    messages = []
    for index, entry in enumerate(entries):
        path = f"messages.{index}"
        if entry.role == "function":
            raise fault(f"{path}.role", ": `function` is not supported. Use `tool`.")
        texts = _texts(entry, path, media)
        if entry.role == "tool":
            parts: tuple[Part, ...] = (_result(entry, texts, calls, path),)
        else:
            parts = tuple(_parts(entry, texts, path))
        message = Message(ROLES[entry.role], parts, name=entry.name)
        calls.add([part.id for part in message.parts if isinstance(part, ToolCall)])
        messages.append(message)
    return tuple(messages)


def _result(entry: ChatMessage, texts: Sequence[str], calls: CallIds, path: str) -> ToolResult:
    sent = entry.tool_call_id or ""
    call_id = calls.resolve(sent, f"{path}.tool_call_id") if sent else ""
    return ToolResult(call_id, entry.name, "\n".join(texts))


def _parts(entry: ChatMessage, texts: Sequence[str], path: str) -> Iterator[Part]:
    if entry.role == "assistant" and (reasoning := entry.reasoning_content or entry.reasoning):
        yield Reasoning(reasoning)
    for text in texts:
        yield Text(text)
    for index, call in enumerate(entry.tool_calls or ()):
        yield _tool_call(call, f"{path}.tool_calls.{index}")


def _texts(entry: ChatMessage, path: str, media: MediaReader) -> list[str]:
    if isinstance(entry.content, list):
        texts = [
            part_text(part, f"{path}.content.{index}", media)
            for index, part in enumerate(entry.content)
        ]
    else:
        texts = [entry.content or ""]
    if entry.audio:  # an earlier reply of a model that speaks
        heard = media.text_of({"type": "audio", "audio": entry.audio})
        if heard is None:
            raise fault(f"{path}.audio", " is not supported.")
        texts.append(heard)
    return [text for text in (*texts, entry.refusal) if text]


def _tool_call(call: ToolCallEntry, path: str) -> ToolCall:
    if call.type != "function":
        raise fault(f"{path}.type", f": tool calls of type `{call.type}` are not supported.")
    if call.function is None:
        raise fault(f"{path}.function", " is required.")
    arguments = call.function.arguments
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(call.id, call.function.name, arguments or "")


def _continues_last(body: ChatCompletionRequest) -> bool:
    """Tell whether the reply continues the last message, in vLLM's or llama-server's words."""
    if body.continue_final_message and body.add_generation_prompt:
        raise fault("continue_final_message", " and `add_generation_prompt` contradict each other.")
    if not body.continue_final_message and body.add_generation_prompt is not False:
        return False
    if body.messages[-1].role != "assistant":
        asked = "continue_final_message" if body.continue_final_message else "add_generation_prompt"
        raise fault(asked, ": only an assistant message at the end can be continued.")
    return True
