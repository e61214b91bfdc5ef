"""Ask a running server how much of recorded requests its cache would find."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rekindle.errors import StartupError
from rekindle.explain.trace_file import miss_of
from rekindle.observe.request_record import Miss

if TYPE_CHECKING:  # httpx takes as long to import as all of `rekindle --help`
    import httpx

    from rekindle.replay.traffic import Traffic


@dataclass(frozen=True, slots=True)
class LookedUp:
    name: str
    n_prompt: int
    n_prefilled: int
    miss: Miss | None


def look_up_all(http: "httpx.Client", traffic: "Traffic") -> Iterator[LookedUp]:
    """Look up each request; the server computes nothing. Raise StartupError if it fails."""
    import httpx

    from rekindle.replay.client import refusal_of

    for request in traffic.requests:
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
            why = refusal_of(response, response.content)
            raise StartupError(f"{request.name}: {http.base_url} refused: {why}.")
        try:
            found = response.json()
            n_prompt, n_prefilled = int(found["prompt_tokens"]), int(found["prefilled"])
            yield LookedUp(request.name, n_prompt, n_prefilled, miss_of(found["miss"]))
        except (ValueError, TypeError, KeyError) as error:
            raise StartupError(f"{http.base_url} is not a Rekindle server.") from error
