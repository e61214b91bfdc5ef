"""llama-server's own completions and infills as wire formats."""

from collections.abc import Mapping, Sequence
from functools import partial

from rekindle.api.completion.bodies import NativeReply, NativeStream
from rekindle.api.completion.request import infill_of, n_replies, native_options, prompts_of
from rekindle.api.completion.response import native_reply
from rekindle.api.completion.schema import InfillRequest, NativeFields, NativeRequest
from rekindle.api.completion.stream import NativeEvents
from rekindle.api.http.caller import Caller
from rekindle.api.pipeline import Exchange, RawPrompt, WireFormat
from rekindle.api.requests.media import MediaReader


def _read_completion(
    body: NativeRequest, _: Caller, __: Mapping[str, str], ___: MediaReader
) -> Exchange:
    return _exchange(body, prompts_of(body))


def _read_infill(
    body: InfillRequest, _: Caller, __: Mapping[str, str], ___: MediaReader
) -> Exchange:
    return _exchange(body, infill_of(body))


def _exchange(body: NativeFields, prompts: Sequence[RawPrompt]) -> Exchange:
    return Exchange(
        prompt=prompts,
        marks=(),
        adapters=body.lora or (),
        n_per_prompt=n_replies(body),
        options=partial(native_options, body),
        encoder=partial(NativeEvents, body),
        whole=partial(native_reply, body),
    )


COMPLETION = WireFormat(
    name="completion",
    operation="native_completion",
    paths=("/completion",),
    schema=NativeRequest,
    body=NativeReply,
    event=NativeStream,
    id_prefix="cmpl-",
    read=_read_completion,
)
INFILL = WireFormat(
    name="infill",
    operation="infill",
    paths=("/infill",),
    schema=InfillRequest,
    body=NativeReply,
    event=NativeStream,
    id_prefix="infill-",
    read=_read_infill,
)
