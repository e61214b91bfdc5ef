"""Count the tokens that side requests prefill, with and without `--sticky-tools`.

    python -m bench.traffic.sticky_tools TRACE.jsonl.gz...

A side request has no tools and comes after a request of the same session that has some. Each is
sent behind that request to `rekindle serve`, on a tiny model with the embedded model's words.
"""

import gzip
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.table import Table

from bench.models.tiny import write_tiny_model_of_real_words
from tests.support.replayed_client import TEMPLATE
from tests.support.server_process import serve
from tests.support.tiny_models import TinyArchitecture

CTX_SIZE = 32768
REPLY_TOKENS = 4  # nobody reads them
SESSION_HEADERS = ("x-session-id", "session-id")
SECONDS = 600.0
BEHIND_LAST_USER = " and loop.index0 > ns.last"
TEMPLATES = {
    "shows all reasoning": TEMPLATE.replace(BEHIND_LAST_USER, ""),
    # A summary is asked for in a new user message, so the thoughts of the last turn disappear.
    "drops earlier reasoning": TEMPLATE,
}
Row = dict[str, Any]


class Side(NamedTuple):
    name: str
    before: Row  # the last request of the session with tools
    request: Row


def main(paths: list[str]) -> None:
    sides = [side for path in paths for side in _sides(Path(path))]
    table = Table("request", "template", "prompt before it", "prefilled", "with --sticky-tools")
    for name, template in TEMPLATES.items():
        costs = [_costs(sides, template, flags) for flags in ((), ("--sticky-tools",))]
        for side, plain, sticky in zip(sides, *costs, strict=True):
            (n_before, n_plain), (_, n_sticky) = plain, sticky
            table.add_row(side.name, name, *(f"{n:,}" for n in (n_before, n_plain, n_sticky)))
    Console().print(table)


def _sides(path: Path) -> Iterator[Side]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    with_tools: dict[str, Row] = {}  # by session
    for row in rows:
        body = row["body"]
        if not isinstance(body, dict) or not (body.get("messages") or body.get("input")):
            continue
        named = [row["headers"].get(name) for name in SESSION_HEADERS]
        session = next((each for each in named if each), row["client"])
        if body.get("tools"):
            with_tools[session] = row
        elif session in with_tools:
            name = f"{path.name.partition('.jsonl')[0]}:{row['seq']}"
            yield Side(name, with_tools[session], row)


def _costs(sides: list[Side], source: str, flags: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return for each the prompt tokens of the request before it, and the tokens it prefilled."""
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model_of_real_words(Path(folder) / "t.gguf", TinyArchitecture.LLAMA)
        template = Path(folder) / "template.jinja"
        template.write_text(source)
        options = ("--chat-template", str(template), "--ctx-size", str(CTX_SIZE), "--no-rewarm")
        for side in sides:
            # A server of its own, so that no other request has computed anything.
            with (
                serve(str(model), *options, "--parallel", "1", *flags) as server,
                httpx.Client(base_url=server.url, timeout=SECONDS) as http,
            ):
                before, now = _story(http, side.before), _story(http, side.request)
            n_before = before["prefilled"] + sum(each["tokens"] for each in before["cached"])
            costs.append((n_before, now["prefilled"]))
    return costs


def _story(http: httpx.Client, row: Row) -> Row:
    limit = "max_output_tokens" if row["api"] == "responses" else "max_tokens"
    body = {k: v for k, v in row["body"].items() if k != "max_completion_tokens"}
    headers = {name: row["headers"][name] for name in SESSION_HEADERS if name in row["headers"]}
    body |= {limit: REPLY_TOKENS, "stream": False, "stream_options": None}
    reply = http.post(row["path"], json=body, headers=headers)
    reply.raise_for_status()
    story: Row = reply.json()["rekindle"]
    return story


if __name__ == "__main__":
    main(sys.argv[1:])
