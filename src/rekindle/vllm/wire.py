"""vLLM's token-in, token-out APIs: the body of a request, and the chunks of a response.

Field names are vLLM's (0.32). There are three equivalent APIs, best first; `Upstream.probe` finds
out which of them an upstream has.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rekindle.errors import InvalidRequest, UpstreamFailed
from rekindle.generation.events import TokenLogprobs, TokenSampled

TOKEN_MARK = "token_id:"  # vLLM's prefix for ids where OpenAI's API has text
DONE = "[DONE]"
MAX_QUOTED = 300  # characters quoted from an upstream's response; picked


class Wire(Enum):
    GENERATE = "/inference/v1/generate"  # ids only; requires a flag of vLLM
    TOKEN_IDS = "/v1/completions with return_token_ids"
    LOGPROBS = "/v1/completions with logprobs"  # ids as the names of scored tokens

    @property
    def path(self) -> str:
        return self.value.split(" ")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamRequest:
    request_id: str
    tokens: Sequence[int]
    sampling: Mapping[str, Any]  # see `sampling_fields`
    salt: str = ""  # prefixes are shared among requests with equal salts
    n_top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One line of a stream."""

    tokens: tuple[TokenSampled, ...] = ()
    finish: str | None = None  # "stop", "length", "abort", ...
    stop_token: int | None = None  # the one of `stop_token_ids` that ended the reply
    n_cached: int | None = None  # None: not reported in this chunk


def body_of(wire: Wire, ask: UpstreamRequest, model: str) -> dict[str, Any]:
    sampling = dict(ask.sampling)
    body: dict[str, Any] = {
        "model": model,
        "request_id": ask.request_id,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if ask.salt:
        body["cache_salt"] = ask.salt
    if ask.n_top_logprobs is not None:
        sampling["logprobs"] = ask.n_top_logprobs
    match wire:
        case Wire.GENERATE:
            sampling["detokenize"] = False
            return {**body, "token_ids": list(ask.tokens), "sampling_params": sampling}
        case Wire.TOKEN_IDS:
            ways = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        case Wire.LOGPROBS:
            ways = {"return_tokens_as_token_ids": True}
            sampling.setdefault("logprobs", 0)
    return {**body, **sampling, **ways, "prompt": list(ask.tokens)}


def parse(wire: Wire, data: str, *, n_top: int | None) -> Chunk:
    """Read a chunk. Raises UpstreamFailed if it is malformed, InvalidRequest if vLLM refuses."""
    try:
        content = json.loads(data)
        if error := content.get("error"):
            raise refusal(int(error.get("code") or 500), data)
        choices = content.get("choices") or []
        chunk = _choice(wire, choices[0], n_top=n_top) if choices else Chunk()
        return Chunk(chunk.tokens, chunk.finish, chunk.stop_token, _n_cached(content))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UpstreamFailed(f"malformed response: {quoted(data)}") from error


def refusal(status: int, text: str) -> InvalidRequest | UpstreamFailed:
    """Return the error for a response with this status."""
    message = quoted(_message(text))
    if status in (400, 413, 422):
        return InvalidRequest(f"vLLM refused the request: {message}")
    return UpstreamFailed(f"status {status}: {message}")


def quoted(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."


def _message(text: str) -> str:
    try:
        content = json.loads(text)
        error = content.get("error", content)
        message = error.get("message") or error.get("detail")
    except (ValueError, AttributeError):
        return text
    return message if isinstance(message, str) else text


def _n_cached(content: Mapping[str, Any]) -> int | None:
    details = (content.get("usage") or {}).get("prompt_tokens_details") or {}
    n_cached = details.get("cached_tokens")
    return None if n_cached is None else int(n_cached)


def _choice(wire: Wire, choice: Mapping[str, Any], *, n_top: int | None) -> Chunk:
    scores = choice.get("logprobs")
    if wire is Wire.LOGPROBS:
        tokens = [_id(name) for name in (scores or {}).get("tokens") or []]
    else:
        tokens = [int(token) for token in choice.get("token_ids") or []]
    scored: list[TokenLogprobs | None] = [None] * len(tokens)
    if n_top is not None and tokens:
        read = _generate_scores if wire is Wire.GENERATE else _scores
        scored = list(read(scores or {}, n_top))
    sampled = tuple(TokenSampled(*pair) for pair in zip(tokens, scored, strict=True))
    reason = choice.get("stop_reason")
    stop_token = reason if isinstance(reason, int) else None
    return Chunk(sampled, choice.get("finish_reason"), stop_token)


def _generate_scores(scores: Mapping[str, Any], n_top: int) -> Iterator[TokenLogprobs]:
    """Yield scores in the shape of chat, with ids as text or, in newer versions, as numbers."""
    for one in scores["content"]:
        top = [(_id_of(each), float(each["logprob"])) for each in one.get("top_logprobs") or []]
        yield TokenLogprobs(float(one["logprob"]), _best(top, n_top))


def _scores(scores: Mapping[str, Any], n_top: int) -> Iterator[TokenLogprobs]:
    tops = scores.get("top_logprobs") or [{}] * len(scores["token_logprobs"])
    for logprob, top in zip(scores["token_logprobs"], tops, strict=True):
        named = [(_id(name), float(value)) for name, value in (top or {}).items()]
        yield TokenLogprobs(float(logprob), _best(named, n_top))


def _best(scored: list[tuple[int, float]], n: int) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(scored, key=lambda pair: -pair[1])[:n])


def _id_of(entry: Mapping[str, Any]) -> int:
    return int(entry["token_id"]) if "token_id" in entry else _id(entry["token"])


def _id(name: str) -> int:
    if not name.startswith(TOKEN_MARK):
        raise ValueError(name)
    return int(name.removeprefix(TOKEN_MARK))
