"""Ollama's chat and generate as wire formats."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from rekindle.api.body import fault
from rekindle.api.http.caller import Caller
from rekindle.api.http.error_shapes import OllamaErrorBody
from rekindle.api.ollama.bodies import OllamaChat, OllamaGeneration
from rekindle.api.ollama.keep_alive import Keeper
from rekindle.api.ollama.messages import (
    chat_conversation,
    generate_conversation,
    reasoning_budget_of,
)
from rekindle.api.ollama.request import limit_of, options_of, overflow_of
from rekindle.api.ollama.response import chat_reply, generation
from rekindle.api.ollama.schema import OllamaChatRequest, OllamaFields, OllamaGenerateRequest
from rekindle.api.ollama.stream import KEEP_ALIVE, MEDIA_TYPE, chat_lines, generate_lines
from rekindle.api.pipeline import Exchange, RawPrompt, TokenContext, WireFormat
from rekindle.api.requests.media import MediaReader
from rekindle.chat.conversation import Conversation
from rekindle.chat.infill import Infill

F = TypeVar("F", bound=OllamaFields)


def ollama_formats(keeper: Keeper) -> tuple[WireFormat[Any], ...]:
    return (
        _format(keeper, "chat", OllamaChatRequest, OllamaChat, _read_chat),
        _format(keeper, "generate", OllamaGenerateRequest, OllamaGeneration, _read_generate),
    )


def _format(
    keeper: Keeper,
    verb: str,
    schema: type[F],
    body: type,
    read: Callable[[F, Caller, Mapping[str, str], MediaReader], Exchange],
) -> WireFormat[F]:
    return WireFormat(
        name=f"ollama_{verb}",
        operation=f"ollama_{verb}",
        paths=(f"/api/{verb}",),
        schema=schema,
        body=body,
        event=body,
        error=OllamaErrorBody,
        id_prefix="ollama-",
        read=read,
        keep_alive=KEEP_ALIVE,
        media_type=MEDIA_TYPE,
        amend=_streamed,
        before=keeper.before_reply,
        while_leased=keeper.while_leased,
    )


def _streamed(body: F, _: Request) -> F:
    """Stream unless the client says no: Ollama's default."""
    return body if body.stream is not None else body.model_copy(update={"stream": True})


def _read_chat(
    body: OllamaChatRequest, _: Caller, __: Mapping[str, str], media: MediaReader
) -> Exchange:
    conversation = chat_conversation(body, media)
    return Exchange(
        prompt=conversation,
        marks=(),
        overflow=overflow_of(body),
        media_omitted=media.omitted,
        reasoning_budget=reasoning_budget_of(body),
        options=partial(options_of, body),
        encoder=partial(chat_lines, body),
        whole=partial(chat_reply, body),
    )


def _read_generate(
    body: OllamaGenerateRequest, _: Caller, __: Mapping[str, str], media: MediaReader
) -> Exchange:
    if body.raw and (body.system or body.context):
        raise fault("raw", " excludes `system` and `context`: write them into the prompt.")
    if body.fills_in and (body.system or body.context or body.images):
        raise fault("suffix", " excludes `system`, `context` and `images`.")
    return Exchange(
        prompt=_generate_prompt(body, media),
        marks=(),
        after=TokenContext("context", body.context) if body.context else None,
        overflow=overflow_of(body),
        media_omitted=media.omitted,
        reasoning_budget=reasoning_budget_of(body),
        options=partial(options_of, body),
        encoder=partial(generate_lines, body),
        whole=partial(generation, body),
    )


def _generate_prompt(
    body: OllamaGenerateRequest, media: MediaReader
) -> Conversation | list[RawPrompt]:
    text = body.prompt or ""
    if body.suffix and body.fills_in:
        infill = Infill(
            prefix=text,
            suffix=body.suffix,
            n_predict=limit_of(body),
            prefix_path="prompt",
            suffix_path="suffix",
        )
        return [RawPrompt("suffix", infill)]
    conversation = generate_conversation(body, media)
    return [RawPrompt("prompt", text)] if body.raw else conversation
