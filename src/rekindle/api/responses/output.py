"""A reply as output items, in sampled order, for whole and streamed responses."""

from collections.abc import Iterator
from dataclasses import dataclass

from rekindle.api.json import GrowingString, string_in
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
    ReplyCallArguments,
    ReplyCallBegan,
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


class OpenCall:
    """A call whose arguments still grow. Clients get the input of a custom tool as plain text."""

    def __init__(self, item: CallBody) -> None:
        self.item = item  # without arguments
        self._input = GrowingString(CUSTOM_ARGUMENT) if item["type"] == "custom_tool_call" else None
        self._n_shown = 0  # characters

    def grown(self, json: str) -> str:
        """Return the text to show for the next piece of the arguments."""
        text = json if self._input is None else self._input.feed(json)
        self._n_shown += len(text)
        return text

    def closed(self, call: ReplyCall) -> tuple[str, CallBody]:
        """Return the text that was not shown yet, and the whole item."""
        status: ItemStatus = "incomplete" if call.is_cut else "completed"
        arguments_json = call.arguments_json
        if self.item["type"] == "function_call":
            return "", {**self.item, "status": status, "arguments": arguments_json}
        # Models sometimes omit the object around the input.
        text = string_in(arguments_json, CUSTOM_ARGUMENT)
        whole = arguments_json if text is None else text
        return whole[self._n_shown :], {**self.item, "status": status, "input": whole}


class Output:
    """The output of one reply as it grows; `items` has those that are whole."""

    def __init__(self, head: ResponseHead) -> None:
        self.items: list[OutputItem] = []
        self._response_key = head.envelope.key
        self._toolbox = head.toolbox
        self._encrypts_reasoning = ENCRYPTED_REASONING in (head.body.include or ())
        self._open: OutputMessage | ReasoningBody | None = None
        self._call: OpenCall | None = None  # the newest one
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
            case ReplyCallBegan():
                yield from self._close("completed")
                self._call = OpenCall(self._call_body(part))
                yield Opened(len(self.items), self._call.item)
            case ReplyCallArguments(_, json):
                assert self._call is not None
                yield from self._grow_call(self._call, self._call.grown(json))
            case ReplyCall():
                assert self._call is not None
                rest, item = self._call.closed(part)
                yield from self._grow_call(self._call, rest)
                yield Closed(len(self.items), item)
                self.items.append(item)

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

    def _grow_call(self, call: OpenCall, text: str) -> Iterator[Grown]:
        if text:
            yield Grown(len(self.items), call.item, text, [])

    def _message(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(
            id=self._id("msg"), type="message", role="assistant", status=status, content=[]
        )

    def _reasoning(self) -> ReasoningBody:
        return ReasoningBody(id=self._id("rs"), type="reasoning", summary=[], content=[])

    def _call_body(self, call: ReplyCallBegan) -> CallBody:
        """Return the item of a call without its arguments."""
        origin = self._toolbox.origin(call.name)
        body: CallBody
        if origin.is_custom:
            body = CustomCallBody(
                id=self._id("ctc"),
                type="custom_tool_call",
                status="in_progress",
                call_id=call.id,
                name=origin.name,
                input="",
            )
        else:
            body = FunctionCallBody(
                id=self._id("fc"),
                type="function_call",
                status="in_progress",
                call_id=call.id,
                name=origin.name,
                arguments="",
            )
        if origin.namespace is not None:
            body["namespace"] = origin.namespace
        return body

    def _id(self, prefix: str) -> str:
        # The id contains the response's key, by which references are resolved.
        return f"{prefix}_{self._response_key}{len(self.items):04x}"
