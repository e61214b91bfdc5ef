"""Streamed replies as the typed events of the Responses API.

Every event has a number, and carries its name in the frame and in the data. The head and tail of
a text frame are made once per item. A token costs one JSON string and a join.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic_core import from_json, to_json

from rekindle.api.json import pieces, quoted
from rekindle.api.responses.bodies import OutputItem, OutputText, ReasoningText, ResponseBody
from rekindle.api.responses.output import Closed, Grown, Opened, Output, Step
from rekindle.api.responses.response import ResponseHead, begun, ended, failed
from rekindle.chat.reply.events import ReplyDone, ReplyEvent, ReplyProgress

CALL_EVENTS = {
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


class ResponseEvents:
    """The frames of one request."""

    def __init__(self, head: ResponseHead, on_end: Callable[[ResponseBody], None]) -> None:
        self._head = head
        self._output = Output(head)
        self._on_end = on_end
        self._n_sent = 0
        self._delta_head = b""  # of the open item, after the number
        self._delta_tail = b""
        self._delta_name = b""

    def begin(self) -> bytes:
        body = begun(self._head)
        return self._frame("response.created", response=body) + self._frame(
            "response.in_progress", response=body
        )

    def encode(self, _index: int, event: ReplyEvent) -> bytes:
        if isinstance(event, ReplyDone):
            return self._finish(event)
        if isinstance(event, ReplyProgress):
            return b""
        return self._frames(self._output.add(event))

    def fail(self, error_body: bytes) -> bytes:
        """Send two events, because clients listen for either. OpenAI's SDKs raise at the first."""
        error = from_json(error_body)["error"]
        fault = {key: error[key] for key in ("code", "message", "param")}
        body = failed(self._head, self._output.items, error)
        return self._frame("error", **fault, error=error) + self._frame(
            "response.failed", response=body
        )

    def end(self) -> bytes:
        return b""  # the last event ends the stream: this API has no [DONE]

    def _finish(self, done: ReplyDone) -> bytes:
        frames = self._frames(self._output.finish(done.finish))
        body = ended(self._head, self._output.items, done)
        self._on_end(body)
        return frames + self._frame(f"response.{body['status']}", response=body)

    def _frames(self, steps: Iterator[Step]) -> bytes:
        return b"".join(frame for step in steps for frame in self._step(step))

    def _step(self, step: Step) -> Iterator[bytes]:
        match step:
            case Opened(index, item):
                yield from self._opened(index, item)
            case Grown(_, item, text) if item["type"] in CALL_EVENTS:
                for piece in pieces(text):
                    yield self._delta(piece, [])
            case Grown(_, _, text, logprobs):
                yield self._delta(text, logprobs)
            case Closed(index, item):
                yield from self._closed(index, item)

    def _opened(self, index: int, item: OutputItem) -> Iterator[bytes]:
        yield self._frame("response.output_item.added", output_index=index, item=item)
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        if item["type"] == "message":
            part: OutputText | ReasoningText = OutputText(
                type="output_text", text="", annotations=[], logprobs=[]
            )
            self._prepare_deltas("response.output_text.delta", place, b',"logprobs":[]}\n\n')
        elif item["type"] == "reasoning":
            part = ReasoningText(type="reasoning_text", text="")
            self._prepare_deltas("response.reasoning_text.delta", place, b"}\n\n")
        else:
            del place["content_index"]
            self._prepare_deltas(f"{CALL_EVENTS[item['type']]}.delta", place, b"}\n\n")
            return
        yield self._frame("response.content_part.added", **place, part=part)

    def _prepare_deltas(self, name: str, place: Mapping[str, Any], tail: bytes) -> None:
        self._delta_name = _head(name)
        self._delta_head = b"," + to_json(place)[1:-1] + b',"delta":'
        self._delta_tail = tail

    def _delta(self, text: str, logprobs: list[Any]) -> bytes:
        tail = self._delta_tail
        if logprobs:
            tail = b',"logprobs":' + to_json(logprobs, ensure_ascii=True) + b"}\n\n"
        return self._delta_name + self._number() + self._delta_head + quoted(text) + tail

    def _closed(self, index: int, item: OutputItem) -> Iterator[bytes]:
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        if item["type"] == "message":
            text = item["content"][0]
            logprobs = text["logprobs"]
            yield self._frame(
                "response.output_text.done", **place, text=text["text"], logprobs=logprobs
            )
            yield self._frame("response.content_part.done", **place, part=text)
        elif item["type"] == "reasoning":
            thought = item["content"][0]
            yield self._frame("response.reasoning_text.done", **place, text=thought["text"])
            yield self._frame("response.content_part.done", **place, part=thought)
        else:
            del place["content_index"]
            if item["type"] == "function_call":
                whole = {"arguments": item["arguments"]}
            else:
                whole = {"input": item["input"]}
            yield self._frame(f"{CALL_EVENTS[item['type']]}.done", **place, **whole)
        yield self._frame("response.output_item.done", output_index=index, item=item)

    def _frame(self, name: str, **data: Any) -> bytes:
        rest = to_json(data, ensure_ascii=True)[1:-1]
        return _head(name) + self._number() + b"," + rest + b"}\n\n"

    def _number(self) -> bytes:
        self._n_sent += 1
        return b"%d" % (self._n_sent - 1)


def _head(name: str) -> bytes:
    return f'event: {name}\ndata: {{"type":"{name}","sequence_number":'.encode()
