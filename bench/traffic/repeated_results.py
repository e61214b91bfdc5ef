"""Count the result tokens that repeat the last result of the same call.

    python -m bench.traffic.repeated_results TRACE.jsonl.gz...

A server could guess a result while its tool runs, and prefill the guess. The best guess is the
last result of the same call (same name, equal arguments) in the same conversation, or in any
conversation of the trace. It is right up to the first difference;
what was prefilled behind that is thrown away. Tokens are those of the embedded model.
"""

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from rekindle.chat.prompt.meaning import canonical_json
from rekindle.llama.model import VocabularyFile
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from rekindle.models.source import resolve_model
from rekindle.replay.as_chat import as_chat
from tests.support.replayed_client import n_shared

Body = dict[str, Any]


class Scope(Enum):
    CONVERSATION = "the same conversation"
    TRACE = "any conversation"


class Result(NamedTuple):
    conversation: object
    call: tuple[str, str]  # name and arguments
    text: str


@dataclass(slots=True)
class Tally:
    n_results: int = 0
    n_tokens: int = 0
    n_guessed: int = 0  # results with an earlier result of the same call
    n_right: int = 0  # tokens before the first difference
    n_wasted: int = 0  # tokens of the guess behind it

    def __add__(self, other: "Tally") -> "Tally":
        names = self.__slots__
        return Tally(*(getattr(self, name) + getattr(other, name) for name in names))


def main(paths: list[str]) -> None:
    vocabulary = VocabularyFile(resolve_model(None).path).vocabulary
    by_trace = {path.partition(".jsonl")[0]: list(_results(Path(path))) for path in paths}
    for scope in Scope:
        table = Table("trace", "results", "tokens", "calls again", "right", "share", "wasted")
        total = Tally()
        for path, results in by_trace.items():
            tally = _tally(vocabulary, results, scope)
            if tally.n_results:
                total += tally
                table.add_row(*_row(Path(path).name, tally))
        table.add_section()
        table.add_row(*_row("all", total))
        table.title = f"Last result of the same call in {scope.value}"
        Console().print(table)


def _row(name: str, tally: Tally) -> list[str]:
    share = tally.n_right / tally.n_tokens if tally.n_tokens else 0.0
    counts = (tally.n_results, tally.n_tokens, tally.n_guessed, tally.n_right)
    return [name, *(f"{n:,}" for n in counts), f"{share:.1%}", f"{tally.n_wasted:,}"]


def _tally(vocabulary: Vocabulary, results: Sequence[Result], scope: Scope) -> Tally:
    tally = Tally()
    last: dict[tuple[object, tuple[str, str]], list[int]] = {}
    for result in results:
        tokens = vocabulary.tokenize(result.text, parse_special=False)
        tally.n_results += 1
        tally.n_tokens += len(tokens)
        place = result.conversation if scope is Scope.CONVERSATION else None
        guess = last.get((place, result.call))
        if guess is not None:
            n_right = n_shared(guess, tokens)
            tally.n_guessed += 1
            tally.n_right += n_right
            tally.n_wasted += len(guess) - n_right
        last[place, result.call] = tokens
    return tally


def _results(path: Path) -> Iterator[Result]:
    """Yield each result once, in the order of the requests."""
    seen: set[tuple[object, str]] = set()
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            body = _chat(row)
            calls: dict[str, tuple[str, str]] = {}
            for message in body.get("messages") or ():
                for call in message.get("tool_calls") or ():
                    function = call["function"]
                    calls[call["id"]] = (function["name"], canonical_json(function["arguments"]))
                if message["role"] != "tool" or message["tool_call_id"] not in calls:
                    continue
                key = (row["conv"], message["tool_call_id"])
                if key not in seen:
                    seen.add(key)
                    call_made = calls[message["tool_call_id"]]
                    yield Result(row["conv"], call_made, _text(message["content"]))


def _chat(row: Body) -> Body:
    if not isinstance(row["body"], dict):
        return {}
    path = row["path"].partition("?")[0]
    return as_chat(SimpleNamespace(path=path, body=row["body"])) or {}  # type: ignore[arg-type]


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part.get("text") or "" for part in content)
    return content or ""


if __name__ == "__main__":
    main(sys.argv[1:])
