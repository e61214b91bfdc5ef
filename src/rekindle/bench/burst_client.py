"""One burst of concurrent streaming completions, in a process of its own.

Reads a `Burst` from stdin and writes a list of `StreamResult` to stdout, as JSON. While the
streams run it only notes when lines arrive: parsing waits until the end, because client and
server share the machine's cores.
"""

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from rekindle.errors import RekindleError

BURST_LIMIT_SECONDS = 600


class BurstFailed(RekindleError):
    """There is nothing to compare."""


@dataclass(frozen=True, slots=True)
class Burst:
    port: int
    prompts: tuple[str, ...]
    max_tokens: int
    cache_prompt: bool = False


@dataclass(frozen=True, slots=True)
class StreamResult:
    text_seconds: list[float]  # when each piece of text came, from the start of the burst
    n_prompt: int
    n_generated: int  # at least one for each piece
    server_decode_rate: float | None  # what the server's own `timings` say


@dataclass(frozen=True, slots=True)
class Frame:
    seconds: float
    data: bytes


def run_burst(burst: Burst) -> list[StreamResult]:
    """Runs this module as a child, so that none of the caller's threads are in the way."""
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
    for (_, writer), prompt in zip(connections, burst.prompts, strict=True):
        writer.write(http_request(prompt, burst))
    streams = await asyncio.gather(*(read_frames(reader, start) for reader, _ in connections))
    for _, writer in connections:
        writer.close()
    return [summarise(frames) for frames in streams]


def http_request(prompt: str, burst: Burst) -> bytes:
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": burst.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_prompt": burst.cache_prompt,
            # llama-server only: at temperature 0 nothing but an argmax.
            "samplers": ["temperature"],
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def read_frames(reader: asyncio.StreamReader, start: float) -> list[Frame]:
    """Both servers write whole SSE lines into each HTTP chunk, so chunk sizes can be skipped."""
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status.decode().strip()}: {(await reader.read()).decode()}")
    frames = []
    while line := await reader.readline():
        if line.startswith(b"data:"):
            frames.append(Frame(perf_counter() - start, line[5:].strip()))
    return frames


def summarise(frames: list[Frame]) -> StreamResult:
    text_seconds: list[float] = []
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] = {}
    for frame in frames:
        if frame.data == b"[DONE]":
            continue
        chunk = json.loads(frame.data)
        if "error" in chunk:
            raise RuntimeError(f"the stream failed: {chunk['error']}")
        if any(choice["text"] for choice in chunk["choices"]):
            text_seconds.append(frame.seconds)
        usage = chunk.get("usage") or usage
        timings = chunk.get("timings") or timings
    if usage is None or not text_seconds:
        raise RuntimeError("the stream ended without text or without usage")
    n_decoded, decode_ms = timings.get("predicted_n", 0), timings.get("predicted_ms", 0)
    return StreamResult(
        text_seconds=text_seconds,
        n_prompt=usage["prompt_tokens"],
        n_generated=usage["completion_tokens"],
        server_decode_rate=1000 * n_decoded / decode_ms if decode_ms else None,
    )


if __name__ == "__main__":
    results = asyncio.run(stream_all(Burst(**json.load(sys.stdin))))
    json.dump([asdict(result) for result in results], sys.stdout)
