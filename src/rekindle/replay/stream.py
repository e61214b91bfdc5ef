"""Read the stream of any wire format as one reply with its token counts."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from rekindle.errors import RekindleError
from rekindle.generation.drafts import DraftCount
from rekindle.priming.stream import account_in

Json = dict[str, Any]


class ReplyFailed(RekindleError):
    """A request failed. The message is the server's, or says how the stream broke."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of a request. None: the server does not report it."""

    n_prompt: int | None = None
    n_cached: int | None = None
    n_prefilled: int | None = None
    n_reply: int | None = None


NO_COUNTS = Counts()


@dataclass(slots=True)
class StreamReader:
    """Reads the lines of a stream, one by one."""

    text: str = ""  # without reasoning and calls, see `is_plain`
    has_begun: bool = False  # a sampled token has arrived
    has_ended: bool = False
    is_plain: bool = True
    _is_chat: bool = False
    _reasoning: str = ""
    _calls: dict[int, Json] = field(default_factory=dict)  # by their index in the message
    _usage: Json = field(default_factory=dict)
    _timings: Json = field(default_factory=dict)
    _ours: Counts | None = None

    def feed(self, line: str) -> None:
        if not line.startswith("data:"):
            return
        content = line.removeprefix("data:").strip()
        if content == "[DONE]":
            self.has_ended = True
            return
        try:
            data = json.loads(content)
        except ValueError as error:
            raise ReplyFailed(f"The stream has a line that is not JSON: {content[:80]}") from error
        if isinstance(data, dict):
            self._read(data)

    def message(self) -> Json | None:
        """Return the message that a client sends back. None: not a chat completion."""
        if not self._is_chat:
            return None
        message: Json = {"role": "assistant", "content": self.text or (None if self._calls else "")}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if self._calls:
            message["tool_calls"] = [self._calls[place] for place in sorted(self._calls)]
        return message

    def counts(self) -> Counts:
        usage, timings = self._usage, self._timings
        # A server may scale `usage` for clients that believe in another window.
        n_reply = _first_int(
            timings.get("predicted_n"), usage.get("completion_tokens"), usage.get("output_tokens")
        )
        if self._ours is not None:
            return replace(self._ours, n_reply=n_reply)
        n_cached = _first_int(*_cached_in(usage), timings.get("cache_n"))
        n_prompt, n_prefilled = _prompt_in(usage), _first_int(timings.get("prompt_n"))
        if n_cached is not None and n_prompt is not None and n_prefilled is None:
            n_prefilled = n_prompt - n_cached
        if n_cached is not None and n_prefilled is not None and n_prompt is None:
            n_prompt = n_cached + n_prefilled
        return Counts(n_prompt, n_cached, n_prefilled, n_reply)

    def drafted(self) -> DraftCount:
        """Return the drafted and accepted tokens of the reply. A server without drafts has none."""
        names = ("draft_n", "draft_n_accepted")
        return DraftCount(*(_first_int(self._timings.get(name)) or 0 for name in names))

    def decode_rate(self) -> float | None:
        """Return the tokens per second by the server's own timings. None: it reports none."""
        n_decoded, milliseconds = (self._timings.get(f"predicted_{unit}") for unit in ("n", "ms"))
        return 1000 * n_decoded / milliseconds if n_decoded and milliseconds else None

    def _read(self, data: Json) -> None:
        _raise_error_in(data)
        if (account := account_in(data)) is not None:
            self._ours = Counts(account.n_tokens, account.n_cached, account.n_computed)
        inner = [_known_fields(data.get(name)) for name in ("response", "message")]
        for holder in (data, *inner):
            # Anthropic: the last event may repeat only some fields of the first.
            self._usage |= _known_fields(holder.get("usage"))
            self._timings |= _known_fields(holder.get("timings"))
        if "choices" in data:
            for choice in data["choices"] or ():
                self._read_choice(choice)
        else:
            self._read_event(str(data.get("type")), data)

    def _read_choice(self, choice: Json) -> None:
        self._is_chat = self._is_chat or "delta" in choice
        delta = choice.get("delta") or {}
        self._add(text=delta.get("content") or choice.get("text") or "")
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        calls = delta.get("tool_calls") or ()
        self._reasoning += str(reasoning)
        for call in calls:
            self._add_call(call)
        self._add_other(is_there=bool(reasoning or calls))
        if choice.get("finish_reason"):
            self.has_ended = True

    def _add_call(self, piece: Json) -> None:
        """Add a piece of a call: the name comes once, the arguments in pieces."""
        function = _known_fields(piece.get("function"))
        place = _first_int(piece.get("index"))
        place = len(self._calls) if place is None else place
        call = self._calls.setdefault(
            place, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = piece.get("id") or call["id"]
        call["function"]["name"] += str(function.get("name", ""))
        call["function"]["arguments"] += str(function.get("arguments", ""))

    def _read_event(self, kind: str, data: Json) -> None:
        """Read an event of the Responses API or of Anthropic's."""
        match kind:
            case "response.output_text.delta":
                self._add(text=data.get("delta") or "")
            case "content_block_delta" if (
                _known_fields(data.get("delta")).get("type") == "text_delta"
            ):
                self._add(text=data["delta"].get("text") or "")
            case "content_block_delta":
                self._add_other(is_there=True)
            case "content_block_start":
                block = data.get("content_block") or {}
                self._add_other(is_there=block.get("type") == "tool_use")
            case "message_stop" | "response.completed" | "response.incomplete":
                self.has_ended = True
            case _ if kind.startswith("response.") and kind.endswith(".delta"):
                self._add_other(is_there=True)

    def _add(self, *, text: str) -> None:
        if text:
            self.has_begun = True
            self.text += text

    def _add_other(self, *, is_there: bool) -> None:
        if is_there:
            self.has_begun, self.is_plain = True, False


def _raise_error_in(data: Json) -> None:
    error = data.get("error") or _known_fields(data.get("response")).get("error")
    if isinstance(error, dict):
        raise ReplyFailed(str(error.get("message") or error))
    if error or data.get("type") == "error":
        raise ReplyFailed(str(error or data.get("message") or data))


def _known_fields(value: object) -> Json:
    if not isinstance(value, dict):
        return {}
    return {name: each for name, each in value.items() if each is not None}


def _prompt_in(usage: Json) -> int | None:
    n_prompt = _first_int(usage.get("prompt_tokens"))
    n_input = _first_int(usage.get("input_tokens"))
    if n_prompt is not None or n_input is None:
        return n_prompt
    # Anthropic's `input_tokens` excludes tokens read from the cache or written to it.
    excluded = ("cache_read_input_tokens", "cache_creation_input_tokens")
    return n_input + sum(_first_int(usage.get(name)) or 0 for name in excluded)


def _cached_in(usage: Json) -> list[object]:
    details = [usage.get(name) for name in ("prompt_tokens_details", "input_tokens_details")]
    reported = [_known_fields(each).get("cached_tokens") for each in details]
    return [*reported, usage.get("cache_read_input_tokens")]


def _first_int(*values: object) -> int | None:
    """Return the first integer. Python takes True for one, JSON does not."""
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)
