"""Measure the first token of turn 2, with and without `rewarm`.

    python -m bench.rewarm [REPLY_TOKENS [ROUNDS]]

The template puts an empty thought into the generation prompt and drops it from history, as Qwen 3
does with thinking switched off. Turn 2 then renders turn 1 differently from how it was sampled. The
user reads for a while between the turns.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import httpx
from rich.console import Console
from rich.table import Table

from rekindle.bench.workloads.workloads import NO_THINKING_TEMPLATE
from rekindle.config.cache import CacheSettings
from rekindle.config.engine import EngineSettings
from rekindle.config.model import ChatSettings, ModelSettings
from rekindle.config.settings import Settings
from rekindle.models.source import resolve_model
from rekindle.server.assembly import assemble
from rekindle.server.serving import background

READING_SECONDS = 6.0


def main(reply_tokens: int = 400, n_rounds: int = 3) -> None:
    table = Table("rewarm", "turn 2: prompt", "prefilled", "first token, ms (median)")
    with ExitStack() as stack:
        urls = {is_on: stack.enter_context(_server(stack, rewarm=is_on)) for is_on in (False, True)}
        results: dict[bool, list[tuple[int, int, float]]] = {False: [], True: []}
        for number in range(n_rounds):
            for is_on, url in urls.items():
                results[is_on].append(_turns(url, number, reply_tokens))
    for is_on, rounds in results.items():
        n_prompt, n_prefilled, _ = rounds[-1]
        first_token_ms = median(seconds for _, _, seconds in rounds) * 1e3
        table.add_row(
            "on" if is_on else "off", str(n_prompt), str(n_prefilled), f"{first_token_ms:.0f}"
        )
    Console().print(table)


@contextmanager
def _server(stack: ExitStack, *, rewarm: bool) -> Iterator[str]:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    settings = Settings(
        model=ModelSettings(chat_template=NO_THINKING_TEMPLATE.read_text()),
        chat=ChatSettings(rewarm=rewarm),
        engine=EngineSettings(parallel=1),
        cache=CacheSettings(cache_dir=Path(folder)),
    )
    with background(assemble(settings, resolve_model(None))) as url:
        yield url


def _turns(url: str, number: int, reply_tokens: int) -> tuple[int, int, float]:
    """Return the prompt tokens of turn 2, those prefilled, and the seconds to its first token."""
    messages = [{"role": "user", "content": f"Tell me story number {number} of the sea."}]
    first = _ask(url, messages, reply_tokens)
    messages += [
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "And then?"},
    ]
    time.sleep(READING_SECONDS)
    started = time.perf_counter()
    second = _ask(url, messages, 1)
    seconds = time.perf_counter() - started
    return second["usage"]["prompt_tokens"], second["timings"]["prompt_n"], seconds


def _ask(url: str, messages: list[dict[str, str]], max_tokens: int) -> dict:  # type: ignore[type-arg]
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
    reply.raise_for_status()
    return reply.json()  # type: ignore[no-any-return]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
