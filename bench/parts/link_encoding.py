"""Measure the encoding of the link to an engine process: msgspec, pickle and JSON.

    python -m bench.parts.link_encoding

One frame of a step with 8 tokens, and one request of 200,000 tokens. JSON has no types: its time
is that of the plain lists alone, without the values that they would have to become.
"""

import json
import pickle
from collections.abc import Callable
from functools import partial
from itertools import repeat
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.engine_run import timed
from rekindle.generation.request import GenerationRequest, Sampling
from rekindle.link.encoding import decode_order, decode_report, encode
from rekindle.link.messages import Step, Submit, Token

N_STREAMS = 8
N_TOKENS = 200_000


class Encoding(NamedTuple):
    name: str
    encode: Callable[[], bytes]
    decode: Callable[[bytes], Any]


def main() -> None:
    sampled = [Token(1_000 + stream, 100_000 + stream) for stream in range(N_STREAMS)]
    step = Step([*sampled])
    tokens = tuple(range(100, 100 + N_TOKENS))
    request = GenerationRequest(
        id="request", prompt=tokens, boundaries=(), sampling=Sampling(seed=1), max_tokens=1
    )
    submit = Submit(1, request)
    plain_step = ["Step", [["Token", event.number, event.token, None] for event in sampled]]
    plain_submit = ["Submit", 1, {"id": "request", "prompt": tokens, "seed": 1}]
    table = Table("message", "encoding", "bytes", "encode us", "decode us")
    for message, n_rounds, encodings in (
        (f"step, {N_STREAMS} tokens", 5_000, _encodings(step, decode_report, plain_step)),
        (f"request, {N_TOKENS:,} tokens", 30, _encodings(submit, decode_order, plain_submit)),
    ):
        for each in encodings:
            data = each.encode()
            there = median(timed(each.encode)[1] for _ in range(n_rounds))
            back = median(timed(partial(each.decode, data))[1] for _ in repeat(None, n_rounds))
            table.add_row(
                message, each.name, f"{len(data):,}", f"{there * 1e6:,.1f}", f"{back * 1e6:,.1f}"
            )
    Console().print(table)


def _encodings(
    message: object, decode: Callable[[bytes], Any], plain: list[Any]
) -> tuple[Encoding, ...]:
    return (
        Encoding("msgspec", partial(encode, message), decode),
        Encoding("pickle", partial(pickle.dumps, message, pickle.HIGHEST_PROTOCOL), pickle.loads),
        Encoding("json", lambda: json.dumps(plain, separators=(",", ":")).encode(), json.loads),
    )


if __name__ == "__main__":
    main()
