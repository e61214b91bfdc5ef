"""Counters and logs of a server: the work that it reports outside its replies."""

import re
from collections.abc import Iterator

import httpx

from rekindle.replay.client import Server
from rekindle.replay.stream import Counts

PREFILLED = "rekindle_prompt_tokens_prefilled_total"
# Log lines of llama_cpp.server. The first is missing if nothing was reused; the last ends a reply.
REUSED = re.compile(r"Llama\.generate: (\d+) prefix-match hit")
PROMPT = re.compile(r"prompt eval time =.*?/\s*(\d+) tokens")
REPLY = re.compile(r"\beval time =.*?/\s*(\d+) runs")


def metric_in(metrics: str, sample: str) -> float | None:
    """Return the value of one sample, for example `name{tier="disk"}`, in the text of /metrics."""
    found = re.search(rf"^{re.escape(sample)} (\S+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else None


async def n_prefilled_by(server: Server) -> int | None:
    """Return the prompt tokens that Rekindle computed since it started, idle work included.

    None: the server has no such counter.
    """
    try:
        response = await server.http.get("/metrics")
    except httpx.HTTPError:
        return None
    value = metric_in(response.text, PREFILLED) if response.is_success else None
    return None if value is None else int(value)


def counts_in(log: str) -> Iterator[Counts]:
    """Yield the counts of each reply in a log of llama_cpp.server, in the order they ended."""
    n_reused = n_prefilled = 0
    for line in log.splitlines():
        if found := REUSED.search(line):
            n_reused = int(found[1])
        elif found := PROMPT.search(line):
            n_prefilled = int(found[1])
        elif found := REPLY.search(line):
            yield Counts(n_reused + n_prefilled, n_reused, n_prefilled, int(found[1]) + 1)
            n_reused = n_prefilled = 0
