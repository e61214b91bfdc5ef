"""A server that speaks completions and little else, in threads of this process."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
MEET_SECONDS = 10.0


class FakeOpenAI:
    """Remembers requests. `meet`: the first replies wait until so many requests are there."""

    def __init__(self, *, meet: int, refuses: bool, drafts: bool) -> None:
        self.url = ""
        self.refuses = refuses
        self.drafts = drafts
        self.bodies: list[Body] = []
        self.most_at_once = 0
        self._meet = meet
        self._n_running = 0
        self._change = threading.Condition()

    def begin(self, body: Body) -> None:
        with self._change:
            self.bodies.append(body)
            self._n_running += 1
            self.most_at_once = max(self.most_at_once, self._n_running)
            self._change.notify_all()
            # The first comes alone, as its client waits for it.
            if len(self.bodies) > 1:
                self._change.wait_for(lambda: self.most_at_once >= self._meet, MEET_SECONDS)

    def end(self) -> None:
        with self._change:
            self._n_running -= 1

    def frames(self, body: Body) -> Iterator[Body]:
        if "prompt" in body:
            for piece, finish in ((" Done", None), (". ", "length")):
                yield {"choices": [{"index": 0, "text": piece, "finish_reason": finish}]}
            timings = {"draft_n": 10, "draft_n_accepted": 9} if self.drafts else {}
            usage = {"prompt_tokens": len(body["prompt"]) // 4, "completion_tokens": 4}
            yield {"choices": [], "usage": usage, "timings": timings}
            return
        if body.get("tool_choice") == "required":
            number = len(self.bodies)
            for index, piece in enumerate(['{"folder":', '"docs"}']):
                head = {"id": f"call_{number}", "type": "function"} if index == 0 else {}
                name = {"name": "list_files"} if index == 0 else {}
                call = {"index": 0, **head, "function": {**name, "arguments": piece}}
                yield _chunk({"tool_calls": [call]})
            yield _chunk({}, "tool_calls")
        else:
            yield _chunk({"content": " Done"})
            yield _chunk({"content": ". "}, "stop")
        n_prompt = len(json.dumps(body["messages"])) // 4
        usage = {"prompt_tokens": n_prompt, "completion_tokens": 4}
        yield {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 0}}}


def _chunk(delta: Body, finish: str | None = None) -> Body:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


@contextmanager
def fake_openai(
    meet: int = 1, *, refuses: bool = False, drafts: bool = False
) -> Iterator[FakeOpenAI]:
    fake = FakeOpenAI(meet=meet, refuses=refuses, drafts=drafts)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._answer(200, b'{"data": [{"id": "fake"}]}')
            else:
                self._answer(404, b"{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path not in ("/v1/chat/completions", "/v1/completions"):
                self._answer(404, b"{}")
            elif fake.refuses:
                self._answer(500, b'{"error": {"message": "out of memory"}}')
            else:
                fake.begin(body)
                lines = [f"data: {json.dumps(frame)}\n\n" for frame in fake.frames(body)]
                fake.end()
                self._answer(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

        def _answer(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        fake.url = f"http://127.0.0.1:{http.server_port}"
        try:
            yield fake
        finally:
            http.shutdown()
            thread.join()
