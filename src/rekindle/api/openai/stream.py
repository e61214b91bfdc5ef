"""Streamed replies in OpenAI's chunks.

The head and tail of a frame are made once per reply. A token costs one JSON string and a join.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic_core import to_json

from rekindle.api.cache.views import rekindle_of
from rekindle.api.http.usage_window import scaled
from rekindle.api.json import pieces, quoted
from rekindle.api.openai.bodies import (
    ChatLogprobs,
    CompletionLogprobs,
    FunctionDelta,
    PromptProgress,
    ToolCallDelta,
)
from rekindle.api.openai.response import (
    CHAT_FINISH,
    FINGERPRINT,
    FINISH,
    chat_logprobs,
    completion_logprobs,
    timings_of,
    usage_of,
)
from rekindle.api.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
)
from rekindle.api.replies import Envelope
from rekindle.chat.reply.events import (
    FinishReason,
    ReplyCall,
    ReplyCallArguments,
    ReplyCallBegan,
    ReplyDone,
    ReplyEvent,
    ReplyPart,
    ReplyProgress,
    ReplyReasoning,
    ReplyStats,
    ReplyText,
    ScoredToken,
)

DONE = b"data: [DONE]\n\n"
UNFINISHED = b',"logprobs":null,"finish_reason":null}]'
END = b"}\n\n"
CALL_HEAD = b'"delta":{"tool_calls":[{"index":%d,"function":{"arguments":'
CALL_TAIL = b"}}]}"
REASONING_HEAD = b'"delta":{"reasoning_content":'


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """The difference between the two endpoints: how a choice holds its text.

    Reasoning and calls have no entry, because only chats have them.
    """

    object: str
    text_head: bytes
    text_tail: bytes
    empty: bytes
    logprobs: Callable[[Sequence[ScoredToken]], ChatLogprobs | CompletionLogprobs]
    finish: Mapping[FinishReason, str]


CHAT = ChunkShape(
    object="chat.completion.chunk",
    text_head=b'"delta":{"content":',
    text_tail=b"}",
    empty=b'"delta":{}',
    logprobs=chat_logprobs,
    finish=CHAT_FINISH,
)
COMPLETION = ChunkShape(
    object="text_completion",
    text_head=b'"text":',
    text_tail=b"",
    empty=b'"text":""',
    logprobs=completion_logprobs,
    finish=FINISH,
)
CHAT_OPENING = b'"delta":{"role":"assistant","content":""}'


class Chunks:
    """The frames of one request. `openings`: the first chunk of each reply, which may be empty."""

    def __init__(
        self,
        shape: ChunkShape,
        body: GenerationFields,
        envelope: Envelope,
        openings: Sequence[bytes],
    ) -> None:
        self._shape = shape
        self._includes_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._shows_progress = body.return_progress is True
        self._n_per_prompt = body.n or 1
        self._usage_scale = envelope.usage_scale
        self._openings = openings
        self._stats: list[ReplyStats | None] = [None] * len(openings)
        constant = {
            "id": envelope.id,
            "object": shape.object,
            "created": envelope.created,
            "model": envelope.model,
            "system_fingerprint": FINGERPRINT,
        }
        self._envelope = b"data: " + to_json(constant)[:-1]
        # If usage is requested, every chunk without it has a null, as OpenAI sends it.
        no_usage = b',"usage":null' if self._includes_usage else b""
        self._choices = [
            self._envelope + no_usage + b',"choices":[{"index":%d,' % index
            for index in range(len(openings))
        ]
        self._text_heads = [choice + shape.text_head for choice in self._choices]
        self._reasoning_heads = [choice + REASONING_HEAD for choice in self._choices]
        self._text_tail = shape.text_tail + UNFINISHED + END

    def begin(self) -> bytes:
        return b"".join(
            choice + opening + UNFINISHED + END
            for choice, opening in zip(self._choices, self._openings, strict=True)
            if opening
        )

    def encode(self, index: int, event: ReplyEvent) -> bytes:
        if isinstance(event, ReplyText):
            return self._text(self._text_heads[index], event)
        if isinstance(event, ReplyReasoning):
            return self._text(self._reasoning_heads[index], event)
        if isinstance(event, ReplyPart):
            return self._call(index, event)
        if isinstance(event, ReplyDone):
            return self._finish(index, event)
        return self._progress(index, event) if self._shows_progress else b""

    def fail(self, error_body: bytes) -> bytes:
        # OpenAI's SDKs raise on `error` and read no further, so no [DONE] follows.
        return b"data: " + error_body + b"\n\n"

    def end(self) -> bytes:
        if not self._includes_usage:
            return DONE
        usage = usage_of(self._all_stats(), self._n_per_prompt)
        counts = to_json(scaled(usage, self._usage_scale))
        return self._envelope + b',"choices":[],"usage":' + counts + self._account() + END + DONE

    def _text(self, head: bytes, event: ReplyText | ReplyReasoning) -> bytes:
        if event.scored:
            tail = self._shape.text_tail + self._unfinished(event.scored) + END
            return head + quoted(event.text) + tail
        return head + quoted(event.text) + self._text_tail

    def _call(self, index: int, event: ReplyCallBegan | ReplyCallArguments | ReplyCall) -> bytes:
        choice, end = self._choices[index], self._unfinished(event.scored) + END
        if isinstance(event, ReplyCallBegan):
            return choice + _begun_call(event) + end
        if isinstance(event, ReplyCallArguments):
            frames = []
            head = choice + CALL_HEAD % event.index
            for piece in pieces(event.json):
                frames.append(head + quoted(piece) + CALL_TAIL + end)
                end = UNFINISHED + END
            return b"".join(frames)
        return choice + self._shape.empty + end if event.scored else b""

    def _unfinished(self, scored: Sequence[ScoredToken]) -> bytes:
        if not scored:
            return UNFINISHED
        logprobs = to_json(self._shape.logprobs(scored), ensure_ascii=True)
        return b',"logprobs":' + logprobs + b',"finish_reason":null}]'

    def _finish(self, index: int, event: ReplyDone) -> bytes:
        self._stats[index] = event.stats
        chunk = (
            self._choices[index]
            + self._shape.empty
            + b',"logprobs":null,"finish_reason":'
            + to_json(self._shape.finish[event.finish])
            + b"}]"
        )
        # llama-server sends its timings in the last chunk.
        if not self._includes_usage and None not in self._stats:
            chunk += self._account()
        return chunk + END

    def _progress(self, index: int, event: ReplyProgress) -> bytes:
        progress = PromptProgress(
            total=event.n_total,
            cache=event.n_cached,
            processed=event.n_done,
            time_ms=round(event.elapsed_seconds * 1e3),
        )
        return (
            self._choices[index]
            + self._shape.empty
            + UNFINISHED
            + b',"prompt_progress":'
            + to_json(progress)
            + END
        )

    def _account(self) -> bytes:
        stats = self._all_stats()
        timings, rekindle = to_json(timings_of(stats)), to_json(rekindle_of(stats))
        return b',"timings":' + timings + b',"rekindle":' + rekindle

    def _all_stats(self) -> list[ReplyStats]:
        return [stats for stats in self._stats if stats is not None]


def chat_chunks(body: ChatCompletionRequest, envelope: Envelope) -> Chunks:
    return Chunks(CHAT, body, envelope, [CHAT_OPENING] * len(envelope.wanted))


def completion_chunks(body: CompletionRequest, envelope: Envelope) -> Chunks:
    echoes = [one.prompt.text if body.echo else "" for one in envelope.wanted]
    openings = [b'"text":' + quoted(echo) if echo else b"" for echo in echoes]
    return Chunks(COMPLETION, body, envelope, openings)


def _begun_call(event: ReplyCallBegan) -> bytes:
    delta = ToolCallDelta(
        index=event.index,
        id=event.id,
        type="function",
        function=FunctionDelta(name=event.name, arguments=""),
    )
    return b'"delta":{"tool_calls":' + to_json([delta], ensure_ascii=True) + b"}"
