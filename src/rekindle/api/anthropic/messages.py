"""Conversion of Anthropic's messages to a neutral `Conversation`."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rekindle.api.anthropic.schema import (
    ContentBlock,
    CountTokensRequest,
    MessageEntry,
    ResultBlock,
    SystemBlock,
)
from rekindle.api.anthropic.tools import OfferedTools, tools_of
from rekindle.api.body import fault
from rekindle.api.content import assistant_message, is_open
from rekindle.api.requests.media import MediaReader
from rekindle.api.tools import CallIds
from rekindle.chat.conversation import (
    Conversation,
    Message,
    Part,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolResult,
)
from rekindle.errors import InvalidRequest

FAILED = "The tool failed."  # text of an error result without content


def conversation_of(body: CountTokensRequest, media: MediaReader) -> Conversation:
    offered = tools_of(body.tools or ())
    reader = _MessageReader(offered, media)
    messages = (*_system(body.system), *reader.read(body.messages))
    return Conversation(
        messages=messages,
        tools=offered.head,
        more_tools=tuple(reader.loaded.values()),
        template_kwargs=_template_kwargs(body),
        continue_last=is_open(messages[-1]),
    )


def n_messages_of(entry: MessageEntry) -> int:
    """Count the messages of the conversation that `_MessageReader` makes of an entry."""
    if isinstance(entry.content, str) or entry.role == "assistant":
        return 1
    n_results = sum(block.type == "tool_result" for block in entry.content)
    # Media become text that is never empty.
    others = (block for block in entry.content if block.type != "tool_result")
    has_text = any(block.type != "text" or block.text for block in others)
    return n_results + (has_text or not n_results)


def reasoning_budget_of(body: CountTokensRequest) -> int | None:
    if body.thinking is None:
        return None
    return 0 if body.thinking.type == "disabled" else body.thinking.budget_tokens


class _MessageReader:
    def __init__(self, offered: OfferedTools, media: MediaReader) -> None:
        self._offered = offered
        self._media = media
        self._calls = CallIds()
        self.loaded: dict[str, Tool] = {}  # deferred tools that a tool result has loaded

    def read(self, entries: Sequence[MessageEntry]) -> Iterator[Message]:
        for index, entry in enumerate(entries):
            path = f"messages.{index}.content"
            if isinstance(entry.content, str):
                parts: tuple[Part, ...] = (Text(entry.content),) if entry.content else ()
                yield Message(Role(entry.role), parts)
            elif entry.role == "assistant":
                yield self._assistant_message(entry.content, path)
            else:
                yield from self._other_messages(Role(entry.role), entry.content, path)

    def _assistant_message(self, blocks: Sequence[ContentBlock], path: str) -> Message:
        """Join blocks of one kind without a separator: a split between blocks has no meaning."""
        reasoning = text = ""
        calls: list[ToolCall] = []
        for index, block in enumerate(blocks):
            match block.type:
                case "text":
                    text += _needed(block.text, f"{path}.{index}.text")
                case "thinking":
                    reasoning += _needed(block.thinking, f"{path}.{index}.thinking")
                case "tool_use":
                    calls.append(_call(block, f"{path}.{index}"))
                case "redacted_thinking":
                    pass  # encrypted for Anthropic's servers
                case _:
                    text += self._media_text(block, f"{path}.{index}")
        self._calls.add([call.id for call in calls])
        return assistant_message(reasoning, text, calls)

    def _other_messages(
        self, role: Role, blocks: Sequence[ContentBlock], path: str
    ) -> Iterator[Message]:
        """Yield tool results first, because they answer the previous message, then the text."""
        texts: list[Part] = []
        n_results = 0
        for index, block in enumerate(blocks):
            if block.type == "text":
                text = _needed(block.text, f"{path}.{index}.text")
                texts += [Text(text)] if text else []
            elif block.type == "tool_result" and role is Role.USER:
                n_results += 1
                yield Message(Role.TOOL, (self._result(block, f"{path}.{index}"),))
            else:
                texts.append(Text(self._media_text(block, f"{path}.{index}")))
        if texts or not n_results:
            yield Message(role, tuple(texts))

    def _result(self, block: ContentBlock, path: str) -> ToolResult:
        sent = _needed(block.tool_use_id, f"{path}.tool_use_id")
        call_id = self._calls.resolve(sent, f"{path}.tool_use_id")
        text = self._result_text(block.content, f"{path}.content")
        return ToolResult(call_id, None, text or (FAILED if block.is_error else ""))

    def _result_text(self, content: str | list[ResultBlock] | None, path: str) -> str:
        if not isinstance(content, list):
            return content or ""
        texts: list[str] = []
        for type_, group in groupby(enumerate(content), key=lambda item: item[1].type):
            blocks = list(group)
            match type_:
                case "text":
                    texts += [_needed(each.text, f"{path}.{i}.text") for i, each in blocks]
                case "tool_reference":
                    names = [_needed(each.tool_name, f"{path}.{i}.tool_name") for i, each in blocks]
                    texts.append(self._load(names))
                case _:
                    texts += [self._media_text(each, f"{path}.{i}") for i, each in blocks]
        return "\n".join(text for text in texts if text)

    def _media_text(self, block: ContentBlock | ResultBlock, path: str) -> str:
        text = self._media.text_of(dict(block))
        if text is None:
            raise _unsupported(block.type, path)
        return text

    def _load(self, names: Sequence[str]) -> str:
        """Show definitions where the client loads them: the prompt before them stays the same."""
        lines = []
        for name in names:
            tool = self._offered.find(name)
            if tool is None:  # the tool may have been removed since; show its name only
                lines.append(json.dumps({"name": name}, ensure_ascii=False))
                continue
            lines.append(tool.definition_json)
            if tool in self._offered.deferred:
                self.loaded[name] = tool
        return "\n".join(["<tools>", *lines, "</tools>"])


def _system(system: str | list[SystemBlock] | None) -> tuple[Message, ...]:
    texts = [block.text for block in system] if isinstance(system, list) else [system or ""]
    parts = tuple(Text(text) for text in texts if text)
    return (Message(Role.SYSTEM, parts),) if parts else ()


def _call(block: ContentBlock, path: str) -> ToolCall:
    name = _needed(block.name, f"{path}.name")
    return ToolCall(block.id, name, json.dumps(block.input or {}, ensure_ascii=False))


def _template_kwargs(body: CountTokensRequest) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    if body.thinking is not None:
        kwargs["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        kwargs["reasoning_effort"] = body.output_config.effort
    return kwargs


def _needed(value: str | None, path: str) -> str:
    if value is None:
        raise fault(path, " is required.")
    return value


def _unsupported(type_: str, path: str) -> InvalidRequest:
    return fault(f"{path}.type", f": content of type `{type_}` is not supported in this message.")
