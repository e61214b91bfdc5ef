"""Roles and parts of messages, as chat completions and Responses send them."""

from collections.abc import Iterable

from rekindle.api.body import WireModel, fault
from rekindle.api.cache_controls import PromptCacheBreakpoint
from rekindle.api.requests.media import MediaReader
from rekindle.chat.conversation import Message, Part, Reasoning, Role, Text, ToolCall

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})


ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}


class TextPart(WireModel):
    type: str
    text: str | None = None


class InputPart(TextPart):
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class ContentPart(InputPart):
    refusal: str | None = None


def assistant_message(reasoning: str, text: str, calls: Iterable[ToolCall]) -> Message:
    """Make one message of all parts of one reply."""
    parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
    parts += [Text(text)] if text else []
    return Message(Role.ASSISTANT, (*parts, *calls))


def is_open(last: Message) -> bool:
    """Tell whether the reply continues the last message, as Anthropic and Google define it."""
    return last.role is Role.ASSISTANT and bool(last.parts) and isinstance(last.parts[-1], Text)


def part_text(part: TextPart, path: str, media: MediaReader) -> str:
    """Return the text of a part, or about its media. Raise InvalidRequest for other parts."""
    if part.type == "refusal":
        return (part.refusal if isinstance(part, ContentPart) else None) or ""
    if part.type not in TEXT_PARTS:
        if (text := media.text_of(dict(part))) is not None:
            return text
        raise fault(f"{path}.type", f": content of type `{part.type}` is not supported. Send text.")
    if part.text is None:
        raise fault(f"{path}.text", " is required.")
    return part.text
