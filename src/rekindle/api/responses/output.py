"""A reply as output items, in sampled order, for whole and streamed responses."""

from collections.abc import Iterator
from dataclasses import dataclass

from rekindle.api.json import string_in
from rekindle.api.openai.bodies import TokenLogprob
from rekindle.api.openai.response import chat_logprobs
from rekindle.api.responses.bodies import (
    CallBody,
    CustomCallBody,
    FunctionCallBody,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningBody,
    ReasoningText,
)
from rekindle.api.responses.items import encrypted
from rekindle.api.responses.response import ResponseHead
from rekindle.api.responses.tools import CUSTOM_ARGUMENT
from rekindle.chat.reply.events import (
    FinishReason,
    ReplyCall,
    ReplyPart,
    ReplyReasoning,
    ReplyText,
    ScoredToken,
)

ENCRYPTED_REASONING = "reasoning.encrypted_content"


@dataclass(frozen=True, slots=True)
class Opened:
    index: int
    item: OutputItem  # still empty


@dataclass(frozen=True, slots=True)
class Grown:
    index: int
    item: OutputItem
    text: str
    logprobs: list[TokenLogprob]


@dataclass(frozen=True, slots=True)
class Closed:
    index: int
    item: OutputItem  # whole


Step = Opened | Grown | Closed


class Output:
    """The output of one reply as it grows; `items` has those that are whole."""

    def __init__(self, head: ResponseHead) -> None:
        self.items: list[OutputItem] = []
        self._response_key = head.envelope.key
        self._toolbox = head.toolbox
        self._encrypts_reasoning = ENCRYPTED_REASONING in (head.body.include or ())
        self._open: OutputMessage | ReasoningBody | None = None
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def add(self, part: ReplyPart) -> Iterator[Step]:
        match part:
            case ReplyText(text, scored):
                if not text and not (scored and self._is_open("message")):
                    return
                if not self._is_open("message"):
                    yield from self._close("completed")
                    yield self._open_item(self._message("in_progress"))
                yield self._grow(text, scored)
            case ReplyReasoning(text):
                if not self._is_open("reasoning"):
                    yield from self._close("completed")
                    yield self._open_item(self._reasoning())
                yield self._grow(text, ())
            case ReplyCall():
                yield from self._close("completed")
                yield from self._call(part)

    def finish(self, reason: FinishReason) -> Iterator[Step]:
        is_cut = reason is FinishReason.LENGTH
        yield from self._close("incomplete" if is_cut else "completed")
        # Agents retry for ever if a reply has neither text nor a call.
        if not is_cut and all(item["type"] == "reasoning" for item in self.items):
            yield self._open_item(self._message("in_progress"))
            yield from self._close("completed")

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _open_item(self, item: OutputMessage | ReasoningBody) -> Opened:
        self._open = item
        self._texts, self._logprobs = [], []
        return Opened(len(self.items), item)

    def _grow(self, text: str, scored: tuple[ScoredToken, ...]) -> Grown:
        assert self._open is not None
        logprobs = chat_logprobs(scored)["content"] if scored else []
        self._texts.append(text)
        self._logprobs += logprobs
        return Grown(len(self.items), self._open, text, logprobs)

    def _close(self, status: ItemStatus) -> Iterator[Closed]:
        if self._open is None:
            return
        text = "".join(self._texts)
        if self._open["type"] == "message":
            part = OutputText(
                type="output_text", text=text, annotations=[], logprobs=self._logprobs
            )
            item: OutputItem = {**self._open, "status": status, "content": [part]}
        else:
            item = {**self._open, "content": [ReasoningText(type="reasoning_text", text=text)]}
            if self._encrypts_reasoning:
                item["encrypted_content"] = encrypted(text)
        self._open = None
        yield Closed(len(self.items), item)
        self.items.append(item)

    def _call(self, call: ReplyCall) -> Iterator[Step]:
        index, whole = len(self.items), self._call_body(call)
        if whole["type"] == "function_call":
            empty: CallBody = {**whole, "status": "in_progress", "arguments": ""}
            text = whole["arguments"]
        else:
            empty = {**whole, "status": "in_progress", "input": ""}
            text = whole["input"]
        yield Opened(index, empty)
        yield Grown(index, empty, text, [])
        yield Closed(index, whole)
        self.items.append(whole)

    def _message(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(
            id=self._id("msg"), type="message", role="assistant", status=status, content=[]
        )

    def _reasoning(self) -> ReasoningBody:
        return ReasoningBody(id=self._id("rs"), type="reasoning", summary=[], content=[])

    def _call_body(self, call: ReplyCall) -> CallBody:
        origin = self._toolbox.origin(call.name)
        body: CallBody
        if origin.is_custom:
            # Models sometimes omit the object around the input.
            text = string_in(call.arguments_json, CUSTOM_ARGUMENT)
            body = CustomCallBody(
                id=self._id("ctc"),
                type="custom_tool_call",
                status="completed",
                call_id=call.id,
                name=origin.name,
                input=call.arguments_json if text is None else text,
            )
        else:
            body = FunctionCallBody(
                id=self._id("fc"),
                type="function_call",
                status="completed",
                call_id=call.id,
                name=origin.name,
                arguments=call.arguments_json,
            )
        if origin.namespace is not None:
            body["namespace"] = origin.namespace
        return body

    def _id(self, prefix: str) -> str:
        # The id contains the response's key, by which references are resolved.
        return f"{prefix}_{self._response_key}{len(self.items):04x}"
