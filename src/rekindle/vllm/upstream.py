"""One vLLM server: its model, a probe that it really generates, and its streams.

Errors are UpstreamFailed and UpstreamTimedOut with the upstream's name in front, or InvalidRequest
if vLLM refuses the client's request.
"""

import logging
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

import httpx

from rekindle.errors import InvalidRequest, UpstreamFailed, UpstreamTimedOut
from rekindle.generation.request import Sampling
from rekindle.vllm.prefix_table import MAX_CHUNKS, PrefixTable
from rekindle.vllm.sampling import sampling_fields
from rekindle.vllm.wire import DONE, Chunk, UpstreamRequest, Wire, body_of, parse, quoted, refusal

_log = logging.getLogger("rekindle.upstream")

CONNECT_SECONDS = 5.0  # picked
FIRST_BYTE_SECONDS = 120.0  # also the limit between any two bytes; picked
PROBE_SECONDS = 60.0  # a probe waits for earlier requests; picked
PROBE_TOKENS = 2


class UpstreamGone(UpstreamFailed):
    """The upstream cannot be reached, or the connection broke: not this request's fault."""


@dataclass(frozen=True, slots=True)
class Served:
    """The model of an upstream, as `/v1/models` names it."""

    model: str
    root: str | None  # path or repository of the model
    n_ctx: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTerms:
    """The prompt of a probe, and the tokens that are valid answers."""

    prompt: Sequence[int]
    n_vocab: int
    end_tokens: Collection[int]


class Upstream:
    """`trouble` says why the upstream is not used now; None: it is used."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        address = httpx.URL(url)
        self.name = str(address.copy_with(userinfo=b"")).rstrip("/")
        self._url = str(address).rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.served: Served | None = None
        self.wire: Wire | None = None
        self.trouble: str | None = "not probed yet"
        self.n_running = 0
        self.reports_cached = False  # a response has reported cached tokens
        self.prefixes = PrefixTable(MAX_CHUNKS)

    async def find_model(self, client: httpx.AsyncClient) -> Served:
        with self._named_errors():
            response = await client.get(f"{self._url}/v1/models", headers=self._headers)
            if response.status_code != 200:
                raise refusal(response.status_code, response.text)
            try:
                [model, *_] = response.json()["data"]
                self.served = Served(
                    str(model["id"]), model.get("root"), int(model["max_model_len"])
                )
            except (ValueError, TypeError, LookupError) as error:
                said = quoted(response.text)
                raise UpstreamFailed(f"/v1/models does not look like vLLM: {said}") from error
        return self.served

    async def probe(self, client: httpx.AsyncClient, terms: ProbeTerms) -> None:
        """Generate two tokens over the first wire that works. `/health` proves nothing."""
        failures = []
        for wire in Wire:
            try:
                await self._try(client, wire, terms)
            except (UpstreamGone, UpstreamTimedOut):
                raise
            except (UpstreamFailed, InvalidRequest) as error:
                failures.append(f"{wire.value}: {error.message}")
            else:
                if wire is not self.wire:
                    _log.info("upstream=%s generates over %s", self.name, wire.value)
                self.wire = wire
                self.trouble = None
                return
        raise UpstreamFailed(f"The upstream {self.name} does not generate: {'; '.join(failures)}")

    async def _try(self, client: httpx.AsyncClient, wire: Wire, terms: ProbeTerms) -> None:
        fields = sampling_fields(
            Sampling(temperature=0), max_tokens=PROBE_TOKENS, end_tokens=terms.end_tokens
        )
        ask = UpstreamRequest(
            request_id=f"probe-{time.monotonic_ns()}",
            tokens=terms.prompt,
            sampling=fields,
        )
        tokens: list[int] = []
        async with aclosing(self.stream(client, wire, ask, seconds=PROBE_SECONDS)) as chunks:
            async for chunk in chunks:
                tokens += [sampled.token for sampled in chunk.tokens]
        is_ended = bool(tokens) and tokens[-1] in terms.end_tokens
        has_length = len(tokens) == PROBE_TOKENS or (len(tokens) < PROBE_TOKENS and is_ended)
        if not has_length or not all(0 <= token < terms.n_vocab for token in tokens):
            raise UpstreamFailed(f"expected {PROBE_TOKENS} tokens, got {quoted(str(tokens))}")

    async def stream(
        self, client: httpx.AsyncClient, wire: Wire, ask: UpstreamRequest, *, seconds: float
    ) -> AsyncGenerator[Chunk]:
        """Yield chunks until the upstream is done. `seconds` is the longest pause between two."""
        assert self.served is not None
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        is_finished = False
        with self._named_errors():
            async with client.stream(
                "POST",
                f"{self._url}{wire.path}",
                json=body_of(wire, ask, self.served.model),
                headers=self._headers,
                timeout=timeout,
            ) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode("utf-8", "replace")
                    raise refusal(response.status_code, text)
                async for line in _lines(response):
                    if not line.startswith(b"data:"):
                        continue
                    data = line.removeprefix(b"data:").strip().decode("utf-8", "replace")
                    if data == DONE:
                        break
                    chunk = parse(wire, data, n_top=ask.n_top_logprobs)
                    is_finished = is_finished or chunk.finish is not None
                    self.reports_cached = self.reports_cached or chunk.n_cached is not None
                    yield chunk
            if not is_finished:
                raise UpstreamGone("the response ended early")

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Put the upstream's name into every error."""
        try:
            yield
        except httpx.ConnectTimeout as error:
            raise UpstreamGone(f"The upstream {self.name} cannot be reached.") from error
        except httpx.TimeoutException as error:
            raise UpstreamTimedOut(f"The upstream {self.name} does not answer.") from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            why = str(error) or type(error).__name__
            raise UpstreamGone(f"The upstream {self.name} failed: {why}.") from error
        except UpstreamFailed as error:
            why = error.message.rstrip(".")
            raise type(error)(f"The upstream {self.name} failed: {why}.") from error


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Split at line feeds alone: httpx also splits at U+2028, which vLLM's JSON has unescaped."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest
