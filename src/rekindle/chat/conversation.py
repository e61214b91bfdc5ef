"""Conversations as neutral, frozen values. Every wire format maps to these, none to another."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments_json: str  # as it was written: serialising it again would change tokens


@dataclass(frozen=True, slots=True)
class ToolResult:
    call_id: str
    name: str | None
    text: str


Part = Text | Reasoning | ToolCall | ToolResult


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    parts: tuple[Part, ...]
    name: str | None = None

    @property
    def text(self) -> str:
        """All text parts, a line each: clients send blocks, and other servers join them so."""
        return "\n".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCall))


@dataclass(frozen=True, slots=True)
class Tool:
    """`definition_json` is the whole OpenAI-style `{"type": "function", "function": {...}}`."""

    name: str
    definition_json: str


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    more_tools: tuple[Tool, ...] = ()  # defined in some message, not at the head of the prompt
    documents_json: tuple[str, ...] = ()
    # Arbitrary JSON that the template may read (`enable_thinking`, ...); the client's own keys.
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    continue_last: bool = False  # the last assistant message is open: go on inside it

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return self.tools + self.more_tools
