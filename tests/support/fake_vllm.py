"""vLLM's HTTP API as 0.32 has it, without a model: in a thread of this process, on a free port.

The next token is a hash of all before it. A prefix cache of 16-token blocks is kept as vLLM's
is: by chained hashes with the salt at their root, of whole blocks that were computed, and never
all of a prompt.
"""

import asyncio
import hashlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

Body = dict[str, Any]
BLOCK_TOKENS = 16
MAX_LOGPROBS = 20  # vLLM's default


@dataclass
class FakeVllm:
    """The server and its switches, which may change while it runs."""

    model: str = "fake/SmolLM2"
    root: str | None = None
    n_ctx: int = 2048
    n_vocab: int = 49152
    end_token: int = 2
    first_token: int = 1000  # sampled ones are of a range that is plain text
    n_sampled: int = 1000
    reply_tokens: int = 6  # before the end token
    has_generate: bool = True  # --enable-scale-out
    has_token_ids: bool = True  # return_token_ids in streams
    api_key: str | None = None  # --api-key
    reports_cached: bool = True  # --enable-prompt-tokens-details
    reports_at_once: bool = False  # in every chunk's usage, as vLLM's Rust frontend does
    status: int = 200  # of generating requests
    dies_after: int | None = None  # tokens of a stream
    answers_garbage: bool = False
    samples_nonsense: bool = False  # ids that no vocabulary has
    url: str = ""
    asked: list[Body] = field(default_factory=list)  # what was to be generated, without probes
    n_probes: int = 0
    n_aborted: int = 0
    aborted: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)  # closed: tokens wait
    blocks: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def prompts(self) -> list[list[int]]:
        return [_prompt(body) for body in self.asked]

    def reply_to(self, tokens: list[int]) -> list[int]:
        """Return the whole reply to this prompt, with the end token."""
        run = list(tokens)
        while len(run) < len(tokens) + self.reply_tokens:
            run.append(self.next_token(run))
        return [*run[len(tokens) :], self.end_token]

    def next_token(self, tokens: list[int]) -> int:
        digest = hashlib.sha256(json.dumps(tokens).encode()).digest()
        return self.first_token + int.from_bytes(digest[:4], "big") % self.n_sampled

    def n_cached(self, tokens: list[int], salt: str) -> int:
        known = 0
        for key in _block_keys(tokens[: len(tokens) - 1], salt):
            if key not in self.blocks:
                break
            known += BLOCK_TOKENS
        return known


@contextmanager
def fake_vllm(**switches: Any) -> Iterator[FakeVllm]:
    fake = FakeVllm(**switches)
    with serving(_app(fake)) as url:
        fake.url = url
        try:
            yield fake
        finally:
            fake.gate.set()


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", loop="asyncio"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[sock]), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
        sock.close()


def _app(fake: FakeVllm) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def check_key(request: Request, answer: Any) -> Response:
        wanted = None if fake.api_key is None else f"Bearer {fake.api_key}"
        if wanted is not None and request.headers.get("authorization") != wanted:
            return JSONResponse({"error": "Unauthorized"}, 401)
        response: Response = await answer(request)
        return response

    @app.get("/health")
    async def health() -> Response:
        return Response()  # whatever is the matter

    @app.get("/v1/models")
    async def models() -> Body:
        card = {"id": fake.model, "object": "model", "owned_by": "vllm", "root": fake.root}
        return {"object": "list", "data": [{**card, "max_model_len": fake.n_ctx}]}

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        if not fake.has_generate:
            return JSONResponse({"detail": "Not Found"}, 404)
        return await _answer(fake, await request.json(), _generate_chunk)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(fake, await request.json(), _completion_chunk)

    return app


async def _answer(fake: FakeVllm, body: Body, shape: Any) -> Response:
    if str(body.get("request_id", "")).startswith("probe"):
        fake.n_probes += 1
    else:
        fake.asked.append(body)
    if fake.status != 200:
        return _error(fake.status, "EngineCore encountered an issue.", "InternalServerError")
    if fake.answers_garbage:
        return PlainTextResponse("data: <html>502</html>\n\n", media_type="text/event-stream")
    sampling = body.get("sampling_params", body)
    tokens = _prompt(body)
    if (refusal := _refusal(fake, body, sampling, tokens)) is not None:
        return refusal
    return StreamingResponse(
        _stream(fake, body, sampling, tokens, shape), media_type="text/event-stream"
    )


def _refusal(fake: FakeVllm, body: Body, sampling: Body, tokens: list[int]) -> Response | None:
    if body.get("model") not in (None, fake.model):
        text = f"The model `{body['model']}` does not exist."
        return _error(404, text, "NotFoundError")
    if len(tokens) + sampling["max_tokens"] > fake.n_ctx or not tokens:
        return _error(400, f"This model's maximum context length is {fake.n_ctx} tokens.")
    if not 0 < sampling["top_p"] <= 1:
        return _error(400, f"top_p must be in (0, 1], got {sampling['top_p']}.")
    if (sampling.get("logprobs") or 0) > MAX_LOGPROBS:
        text = f"Requested sample logprobs of {sampling['logprobs']}, which is greater than"
        return _error(400, f"{text} max allowed: {MAX_LOGPROBS}")
    if body.get("cache_salt") == "":
        return _error(400, "Parameter 'cache_salt' must be a non-empty string if provided.")
    return None


async def _stream(
    fake: FakeVllm, body: Body, sampling: Body, tokens: list[int], shape: Any
) -> AsyncIterator[str]:
    salt = body.get("cache_salt") or ""
    n_cached = fake.n_cached(tokens, salt)
    run = list(tokens)
    finish = None
    try:
        while finish is None:
            while not fake.gate.is_set():  # noqa: ASYNC110 - another thread opens it
                await asyncio.sleep(0.005)
            n_done = len(run) - len(tokens)
            if fake.dies_after is not None and n_done >= fake.dies_after:
                raise ConnectionResetError
            is_over = n_done == fake.reply_tokens and not sampling["ignore_eos"]
            token = fake.end_token if is_over else fake.next_token(run)
            run.append(fake.n_vocab + 7 if fake.samples_nonsense else token)
            if token in sampling.get("stop_token_ids", ()):
                finish = "stop"
            elif n_done + 1 == sampling["max_tokens"]:
                finish = "length"
            fake.blocks |= set(_block_keys(run[:-1], salt))
            usage = _usage(fake, tokens, n_done + 1, n_cached if fake.reports_at_once else None)
            chunk = shape(fake, body, sampling, run, finish)
            yield f"data: {json.dumps({**chunk, 'usage': usage})}\n\n"
        usage = _usage(fake, tokens, len(run) - len(tokens), n_cached)
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"
    except asyncio.CancelledError:
        fake.n_aborted += 1
        fake.aborted.set()
        raise


def _usage(fake: FakeVllm, tokens: list[int], n_sampled: int, n_cached: int | None) -> Body:
    counts = {"prompt_tokens": len(tokens), "completion_tokens": n_sampled}
    usage: Body = {**counts, "total_tokens": sum(counts.values())}
    if fake.reports_cached and n_cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": n_cached}
    return usage


def _generate_chunk(
    fake: FakeVllm, body: Body, sampling: Body, run: list[int], finish: str | None
) -> Body:
    choice: Body = {"index": 0, "token_ids": run[-1:], **_end(run, finish), "logprobs": None}
    if (n_top := sampling.get("logprobs")) is not None:
        top = [{"token_id": token, "logprob": score} for token, score in _scores(fake, run, n_top)]
        choice["logprobs"] = {"content": [{**top[0], "rank": 1, "top_logprobs": top}]}
    return {"request_id": f"generate-tokens-{body['request_id']}", "choices": [choice]}


def _completion_chunk(
    fake: FakeVllm, body: Body, sampling: Body, run: list[int], finish: str | None
) -> Body:
    choice: Body = {"index": 0, "text": "...", **_end(run, finish), "logprobs": None}
    if body.get("return_token_ids") and fake.has_token_ids:
        choice["token_ids"] = run[-1:]
    if (n_top := sampling.get("logprobs")) is not None:
        assert body["return_tokens_as_token_ids"]
        scores = {f"token_id:{token}": score for token, score in _scores(fake, run, n_top)}
        name = f"token_id:{run[-1]}"
        choice["logprobs"] = {
            "tokens": [name],
            "token_logprobs": [scores[name]],
            "top_logprobs": [scores],
            "text_offset": [0],
        }
    return {"id": f"cmpl-{body['request_id']}", "object": "text_completion", "choices": [choice]}


def _end(run: list[int], finish: str | None) -> Body:
    return {"finish_reason": finish, "stop_reason": run[-1] if finish == "stop" else None}


def _scores(fake: FakeVllm, run: list[int], n_top: int) -> list[tuple[int, float]]:
    """The sampled one first, as vLLM has them."""
    others = range(fake.first_token, fake.first_token + n_top + 1)
    ranked = [run[-1], *(token for token in others if token != run[-1])][: max(n_top, 1)]
    return [(token, -0.5 - rank) for rank, token in enumerate(ranked)]


def _block_keys(tokens: list[int], salt: str) -> Iterator[bytes]:
    key = salt.encode()
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = json.dumps(tokens[start : start + BLOCK_TOKENS]).encode()
        key = hashlib.sha256(key + block).digest()
        yield key


def _prompt(body: Body) -> list[int]:
    tokens: list[int] = body["token_ids"] if "token_ids" in body else body["prompt"]
    return tokens


def _error(status: int, message: str, kind: str = "BadRequestError") -> Response:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status)
