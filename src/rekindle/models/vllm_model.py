"""Factory of models that vLLM servers compute; this process holds tokenizer, template and turns."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import httpx

from rekindle.chat.rerank import RerankFormat
from rekindle.config.settings import Settings
from rekindle.errors import RekindleError, StartupError, UpstreamFailed, UpstreamsAway
from rekindle.generation.status import CacheCounters
from rekindle.models.card import ModelCard
from rekindle.models.chat_setup import read_template, set_up_chat
from rekindle.models.serving_model import ServerParts, ServingModel
from rekindle.models.stores import ModelStores
from rekindle.vllm.engine import VllmEngine
from rekindle.vllm.fleet import Fleet, check_same
from rekindle.vllm.hf_folder import HfFolder, read_folder
from rekindle.vllm.hf_tokenizer import HfTokenizer
from rekindle.vllm.upstream import FIRST_BYTE_SECONDS, ProbeTerms, Served, Upstream

KEY_VARIABLE = "VLLM_API_KEY"  # the name that vLLM uses
PROBE_TEXT = "One, two,"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UpstreamSource:
    """vLLM servers, the model they serve, and the folder with its tokenizer."""

    upstreams: tuple[Upstream, ...]
    served: Served
    folder: HfFolder

    @property
    def name(self) -> str:
        return Path(self.served.model).name

    @property
    def path(self) -> Path:
        return self.folder.path


def find_upstreams(settings: Settings) -> UpstreamSource:
    """Ask the upstreams for their model. Blocking, on a thread without an event loop.

    Raises StartupError.
    """
    urls = settings.engine.upstream
    if not urls:
        raise StartupError("--engine vllm needs --upstream with the base URL of a vLLM server.")
    if settings.model.models or settings.model.models_dir:
        raise StartupError("--models and --models-dir do not work with --engine vllm.")
    for url in urls:
        if not _is_http(url):
            raise StartupError(f"--upstream {url} is not an http:// or https:// URL.")
    upstreams = tuple(Upstream(url, api_key=os.environ.get(KEY_VARIABLE)) for url in urls)
    served = asyncio.run(_find_model(upstreams))
    if settings.engine.ctx_size:
        served = replace(served, n_ctx=min(served.n_ctx, settings.engine.ctx_size))
    return UpstreamSource(upstreams, served, _folder(settings.model.model, served))


def load_upstream(
    parts: ServerParts, name: str, source: UpstreamSource, stores: ModelStores
) -> ServingModel:
    """Check that the upstreams answer as needed, and build the model.

    Blocking, on a thread without an event loop. Raises StartupError.
    """
    folder, served, settings = source.folder, source.served, parts.settings.engine
    tokenizer = HfTokenizer(folder)
    terms = ProbeTerms(
        prompt=tokenizer.tokenize(PROBE_TEXT, parse_special=False),
        n_vocab=tokenizer.n_vocab,
        end_tokens=tokenizer.end_tokens,
    )
    asyncio.run(_probe(source, terms))
    engine = VllmEngine(
        Fleet(source.upstreams, served, terms, n_each=settings.parallel),
        queue_size=settings.queue_size,
        first_byte_seconds=FIRST_BYTE_SECONDS,
    )
    read = read_template(parts.settings, name, folder.chat_template, tokenizer)
    responder = set_up_chat(
        parts,
        name,
        engine,
        tokenizer,
        stores.open_turns(folder.digest(served.model)),
        read=read,
        default_sampling=folder.default_sampling,
        embedding_end_token=None,
        rerank_format=RerankFormat(),
        can_rewarm=False,
    )
    card = ModelCard(
        id=name,
        path=str(folder.path),
        created=int(time.time()),
        n_ctx=served.n_ctx,
        n_ctx_train=folder.n_ctx_train or served.n_ctx,
        n_vocab=tokenizer.n_vocab,
        architecture=folder.architecture,
        chat_template=read.template.source,
        bos_text=tokenizer.bos_text,
        eos_text=tokenizer.eos_text,
    )
    # Weights and rows are in vLLM's memory; this process holds remembered turns only.
    return ServingModel(
        card,
        responder,
        engine,
        n_bytes=lambda: 0,
        close=lambda: stores.close(CacheCounters(), {}),
    )


def _is_http(url: str) -> bool:
    try:
        return httpx.URL(url).scheme in ("http", "https")
    except httpx.InvalidURL:
        return False


async def _find_model(upstreams: Sequence[Upstream]) -> Served:
    """Return the model that all answering upstreams serve, with their shortest context."""
    answers = await _ask_each(upstreams, lambda each, client: each.find_model(client))
    if not answers:
        raise UpstreamsAway(_nobody(upstreams))
    served = min((served for _, served in answers), key=lambda each: each.n_ctx)
    try:
        for upstream, answer in answers:
            check_same(upstream, answer, served)
    except UpstreamFailed as error:
        raise StartupError(error.message) from error
    return served


async def _probe(source: UpstreamSource, terms: ProbeTerms) -> None:
    answering = [each for each in source.upstreams if each.served is not None]
    await _ask_each(answering, lambda each, client: each.probe(client, terms))
    if all(each.trouble for each in source.upstreams):
        raise UpstreamsAway(_nobody(source.upstreams))


async def _ask_each(
    upstreams: Sequence[Upstream], ask: Callable[[Upstream, httpx.AsyncClient], Awaitable[T]]
) -> list[tuple[Upstream, T]]:
    """Ask all upstreams at the same time. Return those that answered; note why others did not."""
    async with httpx.AsyncClient() as client:
        outcomes = await asyncio.gather(
            *(ask(each, client) for each in upstreams), return_exceptions=True
        )
    answers: list[tuple[Upstream, T]] = []
    for upstream, outcome in zip(upstreams, outcomes, strict=True):
        if isinstance(outcome, RekindleError):
            upstream.trouble = outcome.message
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            answers.append((upstream, outcome))
    return answers


def _nobody(upstreams: Sequence[Upstream]) -> str:
    return "No upstream can be used. " + " ".join(each.trouble or "" for each in upstreams)


def _folder(setting: str | None, served: Served) -> HfFolder:
    if setting is not None:
        return read_folder(Path(setting).expanduser())
    if served.root and (root := Path(served.root)).is_dir():
        return read_folder(root)
    raise StartupError(
        f"The tokenizer of {served.model} is missing: pass as MODEL a folder with its"
        " tokenizer.json, tokenizer_config.json and generation_config.json. vLLM's own"
        " /tokenize would turn a client's text into control tokens."
    )
