"""Conversion of Gemini's contents to a neutral `Conversation`."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from rekindle.api.body import fault
from rekindle.api.content import assistant_message, is_open
from rekindle.api.gemini.schema import (
    CountedRequest,
    FileData,
    FunctionCall,
    FunctionResponse,
    GeminiContent,
    GeminiPart,
    GenerationConfig,
    InlineData,
    PromptFields,
)
from rekindle.api.gemini.tools import tools_of
from rekindle.api.requests.media import MediaReader
from rekindle.api.requests.reasoning import limit_of
from rekindle.api.tools import CallIds, OpenCalls
from rekindle.chat.conversation import (
    Conversation,
    Message,
    Part,
    Role,
    Text,
    ToolCall,
    ToolResult,
)

# A response that has nothing but its result: Google's name for it, and the one of its SDKs.
RESULT_KEYS = ("output", "result")
MEDIA_KINDS = frozenset({"image", "audio", "video"})


class ReadContents(NamedTuple):
    conversation: Conversation
    n_stored: int  # messages of the cached content, at the front


def read_contents(
    body: CountedRequest, media: MediaReader, stored: PromptFields | None = None
) -> ReadContents:
    """Make the conversation. `stored`: the cached content that the request continues."""
    if not body.contents:
        raise fault("contents", " is required.")
    head = stored or body
    reader = _ContentReader(media)
    before = _system(head)
    if stored is not None:
        before += tuple(reader.read(stored.contents or (), "cachedContent.contents"))
    messages = (*before, *reader.read(body.contents, "contents"))
    conversation = Conversation(
        messages=messages,
        tools=tools_of(head.tools or ()),
        template_kwargs=_template_kwargs(body.generation_config),
        continue_last=is_open(messages[-1]),
    )
    return ReadContents(conversation, len(before) if stored is not None else 0)


def stored_conversation(stored: PromptFields, media: MediaReader) -> Conversation:
    """Make the conversation of a cached content alone."""
    reader = _ContentReader(media)
    messages = (*_system(stored), *reader.read(stored.contents or (), "contents"))
    if not messages:
        raise fault("contents", " is required, or `systemInstruction`.")
    return Conversation(messages=messages, tools=tools_of(stored.tools or ()))


def reasoning_budget_of(config: GenerationConfig | None) -> int | None:
    thinking = config.thinking_config if config else None
    return limit_of(thinking.thinking_budget) if thinking else None


def text_of(content: GeminiContent, path: str) -> str:
    """Return the text of a content that has nothing else."""
    texts = []
    for index, part in enumerate(content.parts or ()):
        if part.text is None:
            raise fault(f"{path}.parts.{index}.text", " is required.")
        texts.append(part.text)
    return "\n".join(texts)


class _ContentReader:
    def __init__(self, media: MediaReader) -> None:
        self._media = media
        self._ids = CallIds()
        self._open = OpenCalls()  # of the last turn
        self._id_by_name: dict[str, str] = {}  # of the last call of each function
        self._n_calls = 0

    def read(self, contents: Sequence[GeminiContent], path: str) -> Iterator[Message]:
        """Yield the messages. The SDKs send each chunk of a streamed reply as a content."""
        placed = [(f"{path}.{index}.parts", content) for index, content in enumerate(contents)]
        for is_model, group in groupby(placed, key=lambda each: each[1].role == "model"):
            if is_model:
                yield self._reply(list(group))
            else:
                for place, content in group:
                    yield from self._others(content, place)

    def _reply(self, chunks: Sequence[tuple[str, GeminiContent]]) -> Message:
        reasoning = text = ""
        calls: list[ToolCall] = []
        for path, content in chunks:
            for index, part in enumerate(content.parts or ()):
                if part.function_call is not None:
                    calls.append(self._call(part.function_call, f"{path}.{index}.functionCall"))
                elif part.thought:
                    reasoning += part.text or ""
                else:
                    text += "".join(self._part_texts(part, f"{path}.{index}"))
        self._ids.add([call.id for call in calls])
        self._open.begin(calls)
        self._id_by_name.update((call.name, call.id) for call in calls)
        return assistant_message(reasoning, text, calls)

    def _others(self, content: GeminiContent, path: str) -> Iterator[Message]:
        """Yield responses first, because they answer the previous message, then the text."""
        parts = content.parts or ()
        n_responses = 0
        for index, part in enumerate(parts):
            if part.function_response is not None:
                n_responses += 1
                place = f"{path}.{index}.functionResponse"
                yield Message(Role.TOOL, (self._result(part.function_response, place),))
        texts = tuple(self._texts(parts, path))
        if texts or not n_responses:
            role = Role.SYSTEM if content.role == "system" else Role.USER
            yield Message(role, texts)

    def _texts(self, parts: Sequence[GeminiPart], path: str) -> Iterator[Part]:
        for index, part in enumerate(parts):
            for text in self._part_texts(part, f"{path}.{index}"):
                if text:
                    yield Text(text)

    def _part_texts(self, part: GeminiPart, path: str) -> Iterator[str]:
        if part.text is not None:
            yield part.text
        if part.executable_code is not None:
            yield part.executable_code.code
        if part.code_execution_result is not None:
            yield part.code_execution_result.output
        if part.inline_data is not None:
            yield self._media_text(part.inline_data, f"{path}.inlineData")
        if part.file_data is not None:
            yield self._media_text(part.file_data, f"{path}.fileData")

    def _call(self, call: FunctionCall, path: str) -> ToolCall:
        if not call.name:
            raise fault(f"{path}.name", " is required.")
        self._n_calls += 1
        # Gemini's clients may leave out ids. A number among all calls stays the same later on.
        call_id = call.id or f"call_{self._n_calls}"
        return ToolCall(call_id, call.name, json.dumps(call.args or {}, ensure_ascii=False))

    def _result(self, response: FunctionResponse, path: str) -> ToolResult:
        call_id = self._answered(response, path)
        texts = [_response_text(response)]
        for index, part in enumerate(response.parts or ()):
            place = f"{path}.parts.{index}"
            if part.inline_data is not None:
                texts.append(self._media_text(part.inline_data, f"{place}.inlineData"))
            if part.file_data is not None:
                texts.append(self._media_text(part.file_data, f"{place}.fileData"))
        return ToolResult(call_id, response.name, "\n".join(text for text in texts if text))

    def _answered(self, response: FunctionResponse, path: str) -> str:
        """Return the id of the call that a response answers: by its id, else by its name."""
        known = self._ids.find(response.id) if response.id else None
        if known is None:
            call = self._open.answer_named(response.name)
            known = call.id if call else self._id_by_name.get(response.name)
        if known is None:
            raise fault(path, f": no earlier call of `{response.name}` is in `contents`.")
        self._open.answer(known)
        return known

    def _media_text(self, media: InlineData | FileData, path: str) -> str:
        kind = (media.mime_type or "").partition("/")[0].lower()
        part = {
            "type": kind if kind in MEDIA_KINDS else "file",
            "mime_type": media.mime_type,
            "filename": media.display_name,
        }
        if isinstance(media, InlineData):
            part["data"] = media.data
        else:
            is_link = "://" in (media.file_uri or "")
            part["url" if is_link else "file_id"] = media.file_uri
        text = self._media.text_of(part)
        if text is None:
            raise fault(path, " is not supported. Send text.")
        return text


def _system(prompt: PromptFields) -> tuple[Message, ...]:
    instruction = prompt.system_instruction
    texts = [part.text for part in instruction.parts or ()] if instruction else []
    parts = tuple(Text(text) for text in texts if text)
    return (Message(Role.SYSTEM, parts),) if parts else ()


def _response_text(response: FunctionResponse) -> str:
    value = response.response or {}
    if len(value) == 1:
        [(key, result)] = value.items()
        if key in RESULT_KEYS:
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False) if value else ""


def _template_kwargs(config: GenerationConfig | None) -> dict[str, object]:
    thinking = config.thinking_config if config else None
    level = thinking.thinking_level if thinking else None
    if not level or level == "THINKING_LEVEL_UNSPECIFIED":
        return {}
    return {"reasoning_effort": level.lower()}
