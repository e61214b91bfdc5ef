"""Embeddings: the work that every wire format asks for in the same way."""

import secrets
from collections.abc import Sequence, Sized

import numpy as np
from fastapi import Request

from rekindle.api.body import fault
from rekindle.api.http.disconnect import unless_client_leaves
from rekindle.chat.embeddings import EmbeddingInput, Embeddings
from rekindle.chat.responder import Responder
from rekindle.errors import InvalidRequest

MAX_INPUTS = 2048  # OpenAI's limit


async def embed(
    request: Request,
    responder: Responder,
    inputs: Sequence[EmbeddingInput],
    *,
    truncates: bool = False,
) -> Embeddings:
    """Make the vectors. Raise ClientGone if the client leaves before they are made."""
    work = responder.embed(inputs, request_id=unique_id(request), truncates=truncates)
    return await unless_client_leaves(request.receive, work)


def unique_id(request: Request) -> str:
    """Return an id for the engine. Clients choose request ids, and may repeat one."""
    return f"{request.scope['request_id']}.{secrets.token_hex(3)}"


def check_inputs(inputs: Sized, field: str = "input") -> None:
    if len(inputs) > MAX_INPUTS:
        raise fault(field, f" has {len(inputs)} items, but at most {MAX_INPUTS} are allowed.")


def check_dimensions(dimensions: int | None, responder: Responder, field: str) -> None:
    """Refuse more dimensions than the model's vectors have. `field` asks for them."""
    status = responder.status().embedder
    if dimensions and status and dimensions > status.n_dimensions:
        raise InvalidRequest(
            f"`{field}` is {dimensions}, but the embeddings of this model have"
            f" {status.n_dimensions}.",
            field,
        )


def shortened(vector: bytes, n_dimensions: int | None) -> bytes:
    """Keep the first dimensions, scaled to length 1. None: keep all."""
    if n_dimensions is None:
        return vector
    kept = np.frombuffer(vector, "<f4")[:n_dimensions].astype(np.float64)
    return (kept / (np.linalg.norm(kept) or 1.0)).astype("<f4").tobytes()


def numbers(vector: bytes) -> list[float]:
    listed: list[float] = np.frombuffer(vector, "<f4").tolist()
    return listed
