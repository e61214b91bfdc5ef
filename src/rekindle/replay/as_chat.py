"""Requests of every wire format as conversations, and as chat completions for /apply-template.

They are converted as Rekindle's own endpoints read them. Other servers may read them differently.
"""

import json
from collections.abc import Iterator

from pydantic import ValidationError

from rekindle.api.anthropic.messages import conversation_of as conversation_of_messages
from rekindle.api.anthropic.schema import CountTokensRequest
from rekindle.api.gemini.contents import read_contents
from rekindle.api.gemini.schema import CountContentRequest
from rekindle.api.ollama.messages import chat_conversation, generate_conversation
from rekindle.api.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from rekindle.api.openai.messages import conversation_of as conversation_of_chat
from rekindle.api.openai.schema import ChatCompletionRequest
from rekindle.api.requests.media import MediaReader
from rekindle.api.responses.items import Placed, read_items
from rekindle.api.responses.request import conversation_of as conversation_of_response
from rekindle.api.responses.schema import CreateResponseRequest, MessageItem, ReferenceItem
from rekindle.api.responses.tools import toolbox_of
from rekindle.chat.conversation import Conversation, Message, Role, Text, ToolResult
from rekindle.config.choices import MediaPolicy
from rekindle.errors import InvalidRequest
from rekindle.priming.files import Body
from rekindle.replay.traffic import ReplayRequest, is_gemini


def as_chat(request: ReplayRequest) -> Body | None:
    """Return the body of a chat completion. None: invalid, or it needs a stored response."""
    if request.path == "/v1/chat/completions":
        return request.body
    conversation = conversation_in(request)
    return None if conversation is None else _chat_body(conversation)


def conversation_in(request: ReplayRequest) -> Conversation | None:
    """Return the conversation. None: invalid, or it needs a stored response or content."""
    media = MediaReader(MediaPolicy.TEXT)
    body = request.body
    try:
        match request.path:
            case "/v1/chat/completions":
                return conversation_of_chat(ChatCompletionRequest.model_validate(body), media)
            case "/v1/messages":
                return conversation_of_messages(CountTokensRequest.model_validate(body), media)
            case "/v1/responses":
                return _of_response(CreateResponseRequest.model_validate(body), media)
            case "/api/chat":
                return chat_conversation(OllamaChatRequest.model_validate(body), media)
            case "/api/generate":
                return generate_conversation(OllamaGenerateRequest.model_validate(body), media)
        if is_gemini(request.path):
            content = CountContentRequest.model_validate(body)
            return None if content.cached_content else read_contents(content, media).conversation
    except (ValidationError, InvalidRequest):
        pass
    return None


def _of_response(body: CreateResponseRequest, media: MediaReader) -> Conversation | None:
    items = body.input
    if isinstance(items, str):
        items = [MessageItem(role="user", content=items)]
    if body.previous_response_id is not None or items is None:
        return None
    if any(isinstance(item, ReferenceItem) for item in items):
        return None
    placed = [Placed(item, "input") for item in items]
    messages = read_items(placed, media).messages
    return conversation_of_response(body, messages, toolbox_of(body.tools or ()))


def _chat_body(conversation: Conversation) -> Body:
    body: Body = {
        "messages": [
            entry for message in conversation.messages for entry in _chat_messages(message)
        ]
    }
    if conversation.tools:
        body["tools"] = [json.loads(tool.definition_json) for tool in conversation.tools]
    if conversation.template_kwargs:
        body["chat_template_kwargs"] = conversation.template_kwargs
    if conversation.continue_last:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body


def _chat_messages(message: Message) -> Iterator[Body]:
    results = [part for part in message.parts if isinstance(part, ToolResult)]
    for result in results:
        entry: Body = {"role": "tool", "tool_call_id": result.call_id, "content": result.text}
        yield entry if result.name is None else {**entry, "name": result.name}
    if message.role is Role.TOOL:
        return
    texts = [part.text for part in message.parts if isinstance(part, Text)]
    parts = [{"type": "text", "text": text} for text in texts]
    entry = {"role": str(message.role), "content": texts[0] if len(texts) == 1 else parts or ""}
    if message.reasoning:
        entry["reasoning_content"] = message.reasoning
    if message.calls:
        entry["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
            }
            for call in message.calls
        ]
    yield entry
