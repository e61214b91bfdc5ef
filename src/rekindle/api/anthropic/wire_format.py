"""Anthropic's Messages as a wire format."""

from collections.abc import Mapping
from functools import partial

from rekindle.api.anthropic.bodies import MessageBody, MessageEvent
from rekindle.api.anthropic.messages import conversation_of, reasoning_budget_of
from rekindle.api.anthropic.request import marks_of, options_of
from rekindle.api.anthropic.response import message_of
from rekindle.api.anthropic.schema import MessagesRequest
from rekindle.api.anthropic.stream import PING, MessageEvents
from rekindle.api.anthropic.tools import unsupported_tools
from rekindle.api.http.caller import Caller
from rekindle.api.http.error_shapes import MessagesErrorBody
from rekindle.api.pipeline import Exchange, WireFormat
from rekindle.api.requests.media import MediaReader
from rekindle.config.choices import Overflow


def _read(
    body: MessagesRequest, _: Caller, headers: Mapping[str, str], media: MediaReader
) -> Exchange:
    conversation = conversation_of(body, media)
    betas = map(str.strip, headers.get("anthropic-beta", "").split(","))
    return Exchange(
        prompt=conversation,
        marks=marks_of(body, conversation),
        overflow=Overflow(body.overflow) if body.overflow else None,
        ignored=[*unsupported_tools(body), *(f"anthropic-beta.{beta}" for beta in betas if beta)],
        media_omitted=media.omitted,
        reasoning_budget=reasoning_budget_of(body),
        options=partial(options_of, body, conversation),
        encoder=partial(MessageEvents, body),
        whole=partial(message_of, body),
    )


MESSAGES = WireFormat(
    name="messages",
    operation="messages",
    paths=("/v1/messages",),
    schema=MessagesRequest,
    body=MessageBody,
    event=MessageEvent,
    error=MessagesErrorBody,
    id_prefix="msg_",
    read=_read,
    keep_alive=PING,
)
