"""Ask a running server how much of recorded requests its cache would find."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rekindle.errors import StartupError
from rekindle.explain.trace_file import miss_of
from rekindle.observe.request_record import Miss

if TYPE_CHECKING:  # httpx takes as long to import as all of `rekindle --help`
    import httpx

    from rekindle.replay.traffic import ReplayRequest, Traffic


@dataclass(frozen=True, slots=True)
class LookedUp:
    name: str
    n_prompt: int
    n_prefilled: int
    miss: Miss | None


def look_up_all(http: "httpx.Client", traffic: "Traffic") -> Iterator[LookedUp]:
    """Look up each request; the server computes nothing. Raise StartupError if it fails."""
    for request in traffic.requests:
        yield _look_up(http, request)


def _look_up(http: "httpx.Client", request: "ReplayRequest") -> LookedUp:
    import httpx

    from rekindle.replay.client import refusal_of

    try:
        response = http.post(
            "/v1/cache/lookup",
            # The first name in the path: chat, completions, responses or messages.
            params={"dialect": request.path.split("/")[2]},
            json=request.body,
            headers=dict(request.headers),
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise StartupError(f"{http.base_url} cannot be reached: {error}.") from error
    if response.is_error:
        raise StartupError(
            f"{request.name}: {http.base_url} refused: {refusal_of(response, response.content)}."
        )
    try:
        found = response.json()
        return LookedUp(
            request.name,
            int(found["prompt_tokens"]),
            int(found["prefilled"]),
            miss_of(found["miss"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise StartupError(f"{http.base_url} is not a Rekindle server.") from error
