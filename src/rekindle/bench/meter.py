"""What servers tell of their work beside their replies: counters and logs."""

import re
from collections.abc import Iterator

import httpx

from rekindle.replay.client import Server
from rekindle.replay.stream import Counts

OUR_COUNTER = re.compile(r"^rekindle_prompt_tokens_prefilled_total (\S+)$", re.MULTILINE)
# llama_cpp.server: the first is missing where nothing was reused; the others end each reply.
REUSED = re.compile(r"Llama\.generate: (\d+) prefix-match hit")
PROMPT = re.compile(r"prompt eval time =.*?/\s*(\d+) tokens")
REPLY = re.compile(r"\beval time =.*?/\s*(\d+) runs")


async def prefilled_so_far(server: Server) -> int | None:
    """Every prompt token that Rekindle computed, also ahead of any request."""
    try:
        response = await server.http.get("/metrics")
    except httpx.HTTPError:
        return None
    found = OUR_COUNTER.search(response.text) if response.is_success else None
    return int(float(found[1])) if found else None


def count_log(log: str) -> list[Counts]:
    """Of each reply of llama_cpp.server, in the order they ended."""
    return list(_replies(log))


def _replies(log: str) -> Iterator[Counts]:
    n_reused = n_prefilled = 0
    for line in log.splitlines():
        if found := REUSED.search(line):
            n_reused = int(found[1])
        elif found := PROMPT.search(line):
            n_prefilled = int(found[1])
        elif found := REPLY.search(line):
            yield Counts(n_reused + n_prefilled, n_reused, n_prefilled, int(found[1]) + 1)
            n_reused = n_prefilled = 0
