"""Gemini's generateContent as a wire format: whole, as server-sent events, as a JSON array."""

import time
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from fastapi import Request
from pydantic import ValidationError

from rekindle.api.body import fault
from rekindle.api.cache_controls import Mark, covered
from rekindle.api.errors import NotFound
from rekindle.api.gemini.bodies import GenerateContentBody
from rekindle.api.gemini.cached import CachedContents, CachedRecord
from rekindle.api.gemini.contents import read_contents, reasoning_budget_of
from rekindle.api.gemini.request import options_of
from rekindle.api.gemini.response import content_body, includes_thoughts
from rekindle.api.gemini.schema import CountedRequest, GenerateContentRequest, PromptFields
from rekindle.api.gemini.stream import ARRAY, EVENTS, KEEP_ALIVE, ContentChunks, Framing
from rekindle.api.gemini.tools import unsupported_tools
from rekindle.api.http.caller import Caller
from rekindle.api.http.error_shapes import GoogleErrorBody
from rekindle.api.pipeline import Exchange, WireFormat
from rekindle.api.requests.media import MediaReader
from rekindle.api.sse import MEDIA_TYPE
from rekindle.config.choices import Overflow
from rekindle.generation.stored_responses import ResponseStore

JSON = "application/json"
PREFIXES = ("/v1beta", "/v1")  # Google's SDKs use one or the other
MODEL = "/models/{model_id:path}"  # `path`, because names may contain slashes
Format = WireFormat[GenerateContentRequest]


class GeminiFormats:
    def __init__(self, store: ResponseStore) -> None:
        self.whole = _format(store, EVENTS, is_stream=False)
        self._events = _format(store, EVENTS, is_stream=True)
        self._array = _format(store, ARRAY, is_stream=True)

    def streamed(self, request: Request) -> Format:
        return self._events if request.query_params.get("alt") == "sse" else self._array


def model_of(name: str | None, request: Request) -> str | None:
    """Return the model that the path names, else the one of the body."""
    named: str | None = request.path_params.get("model_id", name)
    return named.removeprefix("models/") if named else None


class Continued(NamedTuple):
    """The cached content that a request continues; None: it continues none."""

    record: CachedRecord | None
    prompt: PromptFields | None


def cached_of(body: CountedRequest, store: ResponseStore, namespace: str) -> Continued:
    """Find the cached content of a request. May wait for the disk."""
    param, name = "cachedContent", body.cached_content
    if name is None:
        return Continued(None, None)
    if body.system_instruction or body.tools or body.tool_config:
        raise fault(
            param,
            " has its own `systemInstruction`, `tools` and `toolConfig`: leave them out.",
        )
    found = CachedContents(store, namespace).find(name, param)
    try:
        return Continued(found.record, found.prompt())
    except ValidationError:
        raise NotFound(f"The cached content '{name:.100}' is damaged.", param) from None


def _format(store: ResponseStore, framing: Framing, *, is_stream: bool) -> Format:
    operation = "streamGenerateContent" if is_stream else "generateContent"
    return WireFormat(
        name="gemini",
        operation=operation,
        paths=tuple(f"{prefix}{MODEL}:{operation}" for prefix in PREFIXES),
        schema=GenerateContentRequest,
        body=GenerateContentBody,
        event=GenerateContentBody if is_stream else None,
        error=GoogleErrorBody,
        id_prefix="",
        read=partial(_read, store, framing),
        blocks=True,
        keep_alive=KEEP_ALIVE,
        media_type=MEDIA_TYPE if framing is EVENTS else JSON,
        amend=partial(_placed, is_stream=is_stream),
    )


def _placed(
    body: GenerateContentRequest, request: Request, *, is_stream: bool
) -> GenerateContentRequest:
    return body.model_copy(update={"model": model_of(body.model, request), "stream": is_stream})


def _read(
    store: ResponseStore,
    framing: Framing,
    body: GenerateContentRequest,
    caller: Caller,
    _: Mapping[str, str],
    media: MediaReader,
) -> Exchange:
    record, stored = cached_of(body, store, caller.namespace)
    conversation, n_stored = read_contents(body, media, stored)
    marks: tuple[Mark, ...] = ()
    if record is not None:
        marks = (Mark(covered(conversation, n_stored), record.expires_at - time.time()),)
    head = stored or body
    return Exchange(
        prompt=conversation,
        marks=marks,
        overflow=Overflow(body.overflow) if body.overflow else None,
        n_per_prompt=body.config.candidate_count or 1,
        ignored=unsupported_tools(head.tools or ()),
        media_omitted=media.omitted,
        reasoning_budget=reasoning_budget_of(body.generation_config),
        options=partial(options_of, body, head.tool_config, conversation),
        encoder=partial(ContentChunks, framing, thinks=includes_thoughts(body)),
        whole=partial(content_body, thinks=includes_thoughts(body)),
    )
