"""Measure what drafts gain in tool calls and in JSON by a schema.

    python -m bench.traffic.forced_tokens URL [ROUNDS]

URL is a running Rekindle. Each request is sent with `speculative` true and false in turn, and
nothing is cached. The time is the server's own `predicted_ms`.
"""

import sys
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from rekindle.bench.workloads.texts import tools

Body = dict[str, Any]
QUESTION = {"role": "user", "content": "Which tests of the billing module fail, and why?"}
PERSON = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 12},
        "date_of_birth": {"type": "string", "maxLength": 10},
        "is_customer": {"type": "boolean"},
    },
    "required": ["full_name", "date_of_birth", "is_customer"],
    "additionalProperties": False,
}
CALL = {"tool_choice": "required", "parallel_tool_calls": False}
CASES: dict[str, Body] = {
    "a call, one tool": {"tools": tools()[:1], **CALL},
    "a call, four tools": {"tools": tools(), **CALL},
    "JSON by a schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    },
}


def main(url: str, n_rounds: int) -> None:
    table = Table("reply", "tokens", "drafts, ms", "without, ms", "ratio", "of the grammar", "same")
    with httpx.Client(base_url=url, timeout=300) as client:
        for name, body in CASES.items():
            replies: dict[bool, list[Body]] = {True: [], False: []}
            for _ in range(n_rounds + 1):
                for drafts, found in replies.items():
                    found.append(_ask(client, {**body, "speculative": drafts}))
            with_drafts, without = (
                median(each["timings"]["predicted_ms"] for each in found[1:])
                for found in replies.values()
            )
            last = replies[True][-1]
            sources = {each["source"]: each for each in last["rekindle"].get("drafts", [])}
            n_accepted = sources.get("grammar", {"accepted": 0})["accepted"]
            table.add_row(
                name,
                str(last["usage"]["completion_tokens"]),
                f"{with_drafts:.0f}",
                f"{without:.0f}",
                f"{with_drafts / without:.2f}",
                str(n_accepted),
                str(_said(last) == _said(replies[False][-1])),
            )
    Console().print(table)


def _ask(client: httpx.Client, fields: Body) -> Body:
    body = {"messages": [QUESTION], "temperature": 0, "cache_prompt": False, **fields}
    answer = client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    reply: Body = answer.json()
    return reply


def _said(reply: Body) -> list[Any]:
    message = reply["choices"][0]["message"]
    calls = message.get("tool_calls") or ()
    return [message["content"], *(call["function"] for call in calls)]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5)
