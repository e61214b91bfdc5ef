"""Conversion of input items to messages of a neutral `Conversation`.

One reply comes back as several items (reasoning, message, calls). They become one message again,
because the reply was sampled as one turn.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.api.content import ROLES, TextPart, assistant_message, part_text
from rekindle.api.json import string_in
from rekindle.api.requests.media import MediaReader
from rekindle.api.responses.schema import (
    CALLED_WITH,
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    InputItem,
    MessageItem,
    OtherItem,
    ReasoningItem,
)
from rekindle.api.responses.tools import CUSTOM_ARGUMENT, full_name
from rekindle.api.tools import CallIds
from rekindle.chat.conversation import (
    Message,
    Role,
    Text,
    ToolCall,
    ToolResult,
)
from rekindle.json_size import is_too_large

# Not refused: an agent cannot change what a tool returned, and could not continue.
LEFT_OUT = "[{type} left out: this model reads only text]"
ENCRYPTED_KEY = "rekindle_reasoning"
MAX_ENCRYPTED_MEMBERS = 64  # `encrypted` writes one


@dataclass(frozen=True, slots=True)
class Placed:
    """An item and its path in the request."""

    item: InputItem
    path: str


@dataclass(frozen=True, slots=True)
class Read:
    messages: tuple[Message, ...]
    skipped: tuple[str, ...]  # types of items that the prompt omits
    breakpoints: tuple[int, ...] = ()  # how many messages each one covers


def read_items(items: Sequence[Placed], media: MediaReader) -> Read:
    reader = _ItemReader(media)
    for placed in items:
        reader.add(placed)
    reader.end_turn()
    return Read(tuple(reader.messages), tuple(reader.skipped), tuple(reader.breakpoints))


def encrypted(reasoning: str) -> str:
    """Encode reasoning for a client that stores the conversation. This is not encryption."""
    return base64.b64encode(json.dumps({ENCRYPTED_KEY: reasoning}).encode()).decode()


def decrypted(content: str) -> str | None:
    """Decode reasoning. Return None for content of another server."""
    try:
        source = base64.b64decode(content, validate=True)
    except ValueError:  # not base64, or not even ASCII
        return None
    if is_too_large(source, MAX_ENCRYPTED_MEMBERS, MAX_ENCRYPTED_MEMBERS):
        return None
    return string_in(source, ENCRYPTED_KEY)


@dataclass(slots=True)
class _Turn:
    """One assistant message while its items are read."""

    reasoning: list[str] = field(default_factory=list)
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    last_was_text: bool = False

    def add_text(self, text: str) -> None:
        # Text before and after a call was sampled as one reply, two messages in a row as two.
        between = "\n" if self.last_was_text and self.text and text else ""
        self.text += between + text
        self.last_was_text = True

    def message(self) -> Message:
        return assistant_message("".join(self.reasoning), self.text, self.calls)


class _ItemReader:
    def __init__(self, media: MediaReader) -> None:
        self._media = media
        self.messages: list[Message] = []
        self.skipped: list[str] = []
        self.breakpoints: list[int] = []
        self._turn: _Turn | None = None
        self._calls = CallIds()

    def add(self, placed: Placed) -> None:
        item, path = placed.item, placed.path
        match item:
            case MessageItem():
                self._add_message(item, path)
            case ReasoningItem():
                turn = self._open_turn()
                turn.reasoning.append(self._reasoning(item, path))
                turn.last_was_text = False
            case FunctionCallItem():
                name = full_name(item.name, item.namespace)
                self._add_call(ToolCall(item.call_id, name, item.arguments))
            case CustomCallItem():
                arguments = json.dumps({CUSTOM_ARGUMENT: item.input}, ensure_ascii=False)
                name = full_name(item.name, item.namespace)
                self._add_call(ToolCall(item.call_id, name, arguments))
            case CallOutputItem():
                self._add_output(item, path)
            case OtherItem():
                self._add_other(item)
            case _:
                raise AssertionError("references must be resolved first")
        n_covered = len(self.messages) + (self._turn is not None)
        self.breakpoints += [n_covered] * _n_breakpoints(item)

    def end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self.messages.append(turn.message())
            self._calls.add([call.id for call in turn.calls])

    def _open_turn(self) -> _Turn:
        if self._turn is None:
            self._turn = _Turn()
        return self._turn

    def _add_message(self, item: MessageItem, path: str) -> None:
        texts = self._texts(item.content, f"{path}.content")
        if item.role == "assistant":
            self._open_turn().add_text("\n".join(texts))
            return
        self.end_turn()
        self.messages.append(Message(ROLES[item.role], tuple(map(Text, texts))))

    def _add_call(self, call: ToolCall) -> None:
        turn = self._open_turn()
        turn.calls.append(call)
        turn.last_was_text = False

    def _add_output(self, item: CallOutputItem, path: str) -> None:
        self.end_turn()
        call_id = self._calls.resolve(item.call_id, f"{path}.call_id")
        self._add_result(call_id, self._output_text(item.output))

    def _add_result(self, call_id: str, text: str) -> None:
        self.messages.append(Message(Role.TOOL, (ToolResult(call_id, None, text),)))

    def _add_other(self, item: OtherItem) -> None:
        """Show calls of other tools, and their outputs, as calls and results if they have an id."""
        extra = item.model_extra or {}
        call_id = extra.get("call_id")
        if isinstance(call_id, str) and item.type.endswith("_call"):
            arguments: object = next((extra[key] for key in CALLED_WITH if key in extra), {})
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            self._add_call(ToolCall(call_id, item.type.removesuffix("_call"), arguments))
            return
        if isinstance(call_id, str) and item.type.endswith("_call_output"):
            self.end_turn()
            known = self._calls.find(call_id)
            if known is not None:
                self._add_result(known, self._other_output(extra.get("output", "")))
                return
        text = self._media.text_of(dict(item))  # an image that the vendor's tool has made
        if text is None:
            self.skipped.append(item.type)
        else:
            self._open_turn().add_text(text)

    def _other_output(self, output: Any) -> str:
        if isinstance(output, list):
            return "\n".join(map(self._other_output, output))
        if isinstance(output, str):
            return output
        text = self._media.text_of(output) if isinstance(output, dict) else None
        return json.dumps(output, ensure_ascii=False) if text is None else text

    def _reasoning(self, item: ReasoningItem, path: str) -> str:
        """Return the exact reasoning if the item has it, else the visible text."""
        if item.encrypted_content and (text := decrypted(item.encrypted_content)) is not None:
            return text
        if item.content:
            return "".join(self._texts(item.content, f"{path}.content"))
        return "\n".join(self._texts(item.summary or [], f"{path}.summary"))

    def _texts(self, content: str | Sequence[TextPart], path: str) -> list[str]:
        if isinstance(content, str):
            return [content] if content else []
        texts = [
            part_text(part, f"{path}.{index}", self._media) for index, part in enumerate(content)
        ]
        return [text for text in texts if text]

    def _output_text(self, output: str | Sequence[TextPart]) -> str:
        if isinstance(output, str):
            return output
        return "\n".join(map(self._output_part, output))

    def _output_part(self, part: TextPart) -> str:
        if part.text is not None:
            return part.text
        return self._media.text_of(dict(part)) or LEFT_OUT.format(type=part.type)


def _n_breakpoints(item: InputItem) -> int:
    match item:
        case MessageItem(content=list(parts)) | CallOutputItem(output=list(parts)):
            return sum(part.prompt_cache_breakpoint is not None for part in parts)
        case _:
            return 0
