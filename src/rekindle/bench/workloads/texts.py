"""Texts as agents send them: instructions, tool definitions, files, logs, questions.

They are drawn from a seed, so every server gets the same. Token counts are approximate.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VERBS = [
    *("read", "write", "check", "update", "load", "store"),
    *("parse", "merge", "validate", "refresh", "resolve", "collect"),
]
NOUNS = [
    *("invoice", "ledger", "session", "worker", "parser", "cache"),
    *("router", "account", "report", "schedule", "token", "index"),
]
QUALITIES = [
    *("stale", "empty", "nested", "partial", "remote"),
    *("pending", "broken", "recent", "doubled", "missing"),
]
RULES = (
    "Before you {verb} the {noun}, look for a {quality} {other} and say what you found.",
    "Never {verb} a {quality} {noun} without a test that fails first.",
    "When the {noun} is {quality}, prefer the smallest change that makes the {other} whole again.",
    "Keep messages about the {noun} short; a {quality} {other} needs one sentence and a path.",
    "If two tools can {verb} the {noun}, take the one that reads less of the {other}.",
)
QUESTIONS = (
    "Why does the {noun} become {quality} after we {verb} the {other}?",
    "Please {verb} the {noun} in the {other} module; it is {quality} since the last release.",
    "Can you find where a {quality} {noun} is made before the {other} is there?",
    "Go on with the {noun}, and leave the {quality} {other} as it is.",
)
CHARACTERS_PER_TOKEN = 4  # picked
FOLDERS = ["src/billing", "src/core", "src/web", "tests", "docs"]
FILES = [f"src/{folder}/{noun}.py" for folder in ("billing", "core") for noun in NOUNS[:4]]


@dataclass(frozen=True, slots=True)
class Texts:
    """`nonce` opens every system prompt, so no server has seen the prompts of this run."""

    nonce: str
    scale: float = 1.0

    def system(self, name: str, n_tokens: int = 700) -> str:
        choose = random.Random(f"system {name}")
        lines = [f"Run {self.nonce}, {name}. You are a careful coding agent in a terminal.", ""]
        return self._filled_up(
            n_tokens, lines, lambda: f"- {_filled(choose.choice(RULES), choose)}"
        )

    def question(self, name: str, n_tokens: int = 40) -> str:
        choose = random.Random(f"question {name}")
        return self._filled_up(n_tokens, [], lambda: _filled(choose.choice(QUESTIONS), choose))

    def tool_result(self, name: str, n_tokens: int = 110) -> str:
        """Return a piece of a file, hits of a search, or the end of a log."""
        choose = random.Random(f"result {name}")
        make = choose.choice([_code_line, _hit_line, _log_line])
        lines: list[str] = []
        return self._filled_up(n_tokens, lines, lambda: make(choose, len(lines)))

    def _filled_up(self, n_tokens: int, lines: list[str], make: Callable[[], str]) -> str:
        n_characters = n_tokens * self.scale * CHARACTERS_PER_TOKEN
        while not lines or sum(map(len, lines)) < n_characters:
            lines.append(make())
        return "\n".join(lines)


def tools() -> list[dict[str, Any]]:
    """Return the tools. Their arguments are enums, so a call by grammar ends soon on any server."""
    return [
        _tool(
            "read_file",
            "Read a part of a file in the repository, with line numbers.",
            {"path": _one_of(FILES), "start": _one_of([1, 100, 200, 400])},
        ),
        _tool(
            "search",
            "Search the files of a folder for a word, and list every line that has it.",
            {"word": _one_of(NOUNS), "folder": _one_of(FOLDERS)},
        ),
        _tool(
            "run_tests",
            "Run one suite of tests and return the end of its output.",
            {"suite": _one_of(["unit", "web", "billing"]), "limit": _one_of([10, 50])},
        ),
        _tool(
            "list_files",
            "List the files of a folder with their sizes, newest first.",
            {"folder": _one_of(FOLDERS)},
        ),
    ]


def as_text(definitions: list[dict[str, Any]]) -> str:
    """Describe the tools in a system prompt, for a server without tool calls."""
    return "\n".join(["# Tools", *(json.dumps(each["function"]) for each in definitions)])


def _tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _one_of(values: list[Any]) -> dict[str, Any]:
    kind = "integer" if isinstance(values[0], int) else "string"
    return {"type": kind, "enum": values}


def _filled(pattern: str, choose: random.Random) -> str:
    noun, other = choose.sample(NOUNS, 2)
    return pattern.format(
        verb=choose.choice(VERBS), noun=noun, other=other, quality=choose.choice(QUALITIES)
    )


def _code_line(choose: random.Random, number: int) -> str:
    noun, other = choose.sample(NOUNS, 2)
    verb = choose.choice(VERBS)
    return (
        f"{number + 1:4}     {noun} = self._{verb}_{other}({other}, limit={choose.randrange(99)})"
    )


def _hit_line(choose: random.Random, number: int) -> str:
    noun, other = choose.sample(NOUNS, 2)
    return f"{choose.choice(FILES)}:{10 + number * 7}: def {choose.choice(VERBS)}_{noun}({other}):"


def _log_line(choose: random.Random, number: int) -> str:
    noun = choose.choice(NOUNS)
    seconds = choose.randrange(1000) / 1000
    return (
        f"{number:3} INFO {noun}: {choose.choice(VERBS)} {choose.choice(QUALITIES)} in {seconds} s"
    )
