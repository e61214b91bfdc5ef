"""One burst of concurrent streaming completions, in a process of its own.

The process reads a `Burst` from stdin and writes a list of `StreamResult` to stdout, as JSON.
While the streams run, the process only notes when lines arrive. Parsing waits for the end, because
client and server share the machine's cores.
"""

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from time import perf_counter

from rekindle.errors import RekindleError
from rekindle.replay.stream import ReplyFailed, StreamReader

BURST_LIMIT_SECONDS = 600


Prompt = str | list[int]  # text, or token ids


class BurstFailed(RekindleError):
    """A burst failed, so there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class Burst:
    port: int
    prompts: tuple[Prompt, ...]
    max_tokens: int
    cache_prompt: bool = False


@dataclass(frozen=True, slots=True)
class StreamResult:
    text_seconds: list[float]  # when each piece of text came, from the start of the burst
    n_prompt: int
    n_generated: int  # at least one for each piece
    server_decode_rate: float | None  # by the server's own `timings`
    text: str = ""
    n_drafted: int = 0
    n_accepted: int = 0  # of the drafted tokens


ArrivedLine = tuple[float, bytes]  # seconds from the start of the burst, text


def run_burst(burst: Burst) -> list[StreamResult]:
    """Run this module as a child process, away from the threads of the caller."""
    try:
        child = subprocess.run(
            [sys.executable, "-m", "rekindle.bench.burst_client"],
            input=json.dumps(asdict(burst)),
            capture_output=True,
            text=True,
            check=True,
            timeout=BURST_LIMIT_SECONDS,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise BurstFailed(f"A burst failed: {error}") from error
    return [StreamResult(**fields) for fields in json.loads(child.stdout)]


async def stream_all(burst: Burst) -> list[StreamResult]:
    connections = [
        await asyncio.open_connection("127.0.0.1", burst.port, limit=2**20) for _ in burst.prompts
    ]
    start = perf_counter()
    for slot, ((_, writer), prompt) in enumerate(zip(connections, burst.prompts, strict=True)):
        writer.write(http_request(prompt, burst, slot))
    streams = await asyncio.gather(*(read_lines(reader, start) for reader, _ in connections))
    for _, writer in connections:
        writer.close()
    return [summarise(lines) for lines in streams]


def http_request(prompt: Prompt, burst: Burst, slot: int) -> bytes:
    # With its slot, a cached prompt can be erased. llama-server chooses the slots of the others.
    named = {"id_slot": slot} if burst.cache_prompt else {}
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": burst.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_prompt": burst.cache_prompt,
            **named,
            # llama-server only: at temperature 0 nothing but an argmax.
            "samplers": ["temperature"],
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def read_lines(reader: asyncio.StreamReader, start: float) -> list[ArrivedLine]:
    """Read the lines of a stream. Servers put whole lines into HTTP chunks; sizes are skipped."""
    status = await reader.readline()
    if b" 200 " not in status:
        raise ReplyFailed(f"{status.decode().strip()}: {(await reader.read()).decode()}")
    lines = []
    while line := await reader.readline():
        lines.append((perf_counter() - start, line))
    return lines


def summarise(lines: list[ArrivedLine]) -> StreamResult:
    reader = StreamReader()
    text_seconds: list[float] = []
    for seconds, line in lines:
        n_before = len(reader.text)
        reader.feed(line.decode())
        if len(reader.text) > n_before:
            text_seconds.append(seconds)
    counts = reader.counts()
    if counts.n_prompt is None or counts.n_reply is None or not text_seconds:
        raise ReplyFailed("The stream ended without text or without usage.")
    drafted = reader.drafted()
    return StreamResult(
        text_seconds,
        counts.n_prompt,
        counts.n_reply,
        reader.decode_rate(),
        reader.text,
        drafted.n_tokens,
        drafted.n_accepted,
    )


if __name__ == "__main__":
    results = asyncio.run(stream_all(Burst(**json.load(sys.stdin))))
    json.dump([asdict(result) for result in results], sys.stdout)
