"""People who tell a server secrets, and a search for what is left of the secrets.

A secret is in prompts, replies, tool calls, names and stored responses. The search reads every
file of the cache directory, every key of a store, and every route that shows stored things.
"""

import json
import random
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis

from tests.support.cache_command import cache

WAIT_SECONDS = 120
LETTERS = "bcdfghjklmnpqrstvwxz"
FORGOTTEN = "forgotten.sqlite3"  # has the names of deleted sessions


def secret_word(noise: random.Random) -> str:
    return "".join(noise.choice(LETTERS) for _ in range(24))


@dataclass
class Person:
    """One session of a namespace, which has told its secrets to servers."""

    salt: str
    session: str
    word: str
    response_ids: list[str] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        salt = {"x-rekindle-cache-salt": self.salt} if self.salt else {}
        return {"x-rekindle-session": self.session, "x-rekindle-explain": "1", **salt}

    def __str__(self) -> str:
        return f"{self.session} of {self.salt or 'the common namespace'}"


class Talk:
    """One person at one server. Each call is a request that has the person's secret in it."""

    def __init__(self, url: str, person: Person) -> None:
        self.person = person
        self.http = httpx.Client(base_url=url, headers=person.headers, timeout=WAIT_SECONDS)

    def close(self) -> None:
        self.http.close()

    def chat(self) -> int:
        """Send one turn more of a conversation. Return how many tokens were cached."""
        word, history = self.person.word, self.person.history
        asked = [*history, {"role": "user", "content": f"{len(history)} The secret is {word}, ok?"}]
        schema = {"type": "object", "properties": {"say": {"const": word}}, "required": ["say"]}
        body = {
            "messages": [{"role": "system", "content": f"You know {word}. " * 12}, *asked],
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
            "temperature": 0,
            "max_tokens": 120,
        }
        reply = self._post("/v1/chat/completions", body)
        message = reply["choices"][0]["message"]
        assert word in message["content"]
        self.person.history = [*asked, {"role": "assistant", "content": message["content"]}]
        cached: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    def call_tool(self) -> None:
        word = self.person.word
        place = {"type": "string", "enum": [word]}
        parameters = {"type": "object", "properties": {"place": place}, "required": ["place"]}
        tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
        asked = {"role": "user", "content": f"Look at {word} with the tool"}
        body = {
            "messages": [asked],
            "tools": [tool],
            "tool_choice": "required",
            "max_tokens": 200,
        }
        message = self._post("/v1/chat/completions", body)["choices"][0]["message"]
        result = {
            "role": "tool",
            "tool_call_id": message["tool_calls"][0]["id"],
            "content": f"{word} is far away",
        }
        self._post("/v1/chat/completions", {**body, "messages": [asked, message, result]})

    def respond(self) -> None:
        ids = self.person.response_ids
        body = {"input": f"Write of {self.person.word} again", "max_output_tokens": 24}
        # A server that was killed may not have written its last response.
        if ids and self.http.get(f"/v1/responses/{ids[-1]}").status_code == 200:
            body["previous_response_id"] = ids[-1]
        ids.append(self._post("/v1/responses", body)["id"])

    def name_prompt(self) -> None:
        word = self.person.word
        body = {
            "prompt": f"A document on {word}. " * 20,
            "max_tokens": 0,
            "cache_key": f"doc-{word}",
            "persist": True,
        }
        self._post("/v1/completions", body)

    def stream(self, n_tokens: int) -> Iterator[bytes]:
        """Begin a long reply. Iterate to its end, or close it."""
        body = {
            "prompt": f"A story of {self.person.word}. " * 20,
            "max_tokens": n_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        with self.http.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            yield from reply.iter_raw()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        reply = self.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()


@dataclass(frozen=True)
class Forms:
    """A secret as bytes: its text, and a run of its token ids as each store writes them."""

    word: str
    tokens: tuple[int, ...]

    def in_bytes(self, data: bytes) -> str | None:
        if self.word.encode() in data:
            return "text"
        for order in ("little", "big"):
            run = b"".join(token.to_bytes(4, order) for token in self.tokens)
            if run in data:
                return f"{order}-endian tokens"
        return None


def forms_of(url: str, word: str) -> Forms:
    """Return the forms. The tokens at both ends depend on the text around the word."""
    reply = httpx.post(f"{url}/tokenize", json={"content": f"is {word}, "}, timeout=WAIT_SECONDS)
    first = httpx.post(f"{url}/tokenize", json={"content": "is "}, timeout=WAIT_SECONDS)
    n_first, tokens = len(first.json()["tokens"]), reply.json()["tokens"]
    inner = tokens[n_first + 2 : -4]
    assert len(inner) >= 4, "the word is too short to be told from others"
    return Forms(word, tuple(inner))


def left_in_files(directory: Path, forms: Forms) -> list[str]:
    found = []
    for path in sorted(directory.rglob("*")):
        with suppress(FileNotFoundError, IsADirectoryError):
            if form := forms.in_bytes(path.read_bytes()):
                found.append(f"{form} in {path.relative_to(directory)}")
    return found + [f"text in response {id}" for id in _responses_with(directory, forms)]


def _responses_with(directory: Path, forms: Forms) -> list[str]:
    path = directory / "responses.sqlite3"
    if not path.exists():
        return []
    with closing(sqlite3.connect(path)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            return []  # a kill came between the file and its tables
        rows = connection.execute("SELECT id, data FROM responses").fetchall()
    return [id.decode() for id, data in rows if forms.in_bytes(zlib.decompress(data)) is not None]


def left_in_store(store: redis.Redis, forms: Forms) -> list[str]:
    found = []
    for key in store.scan_iter("*", count=1000):
        kind = store.type(key)
        values = [store.get(key)] if kind == b"string" else list(store.smembers(key))
        for data in [key, *values]:
            if data is not None and (form := forms.in_bytes(data)):
                found.append(f"{form} in key {key!r}")
    return found


def left_in_routes(url: str, person: Person, forms: Forms) -> list[str]:
    """Read everything that the server shows the person."""
    found = []
    with httpx.Client(base_url=url, headers=person.headers, timeout=WAIT_SECONDS) as http:
        paths = ["/v1/cache?limit=1000", "/v1/cache/forest?limit=10000", "/v1/sessions", "/slots"]
        paths += ["/metrics", "/props", *(f"/v1/responses/{id}" for id in person.response_ids)]
        forest = http.get("/v1/cache/forest?limit=10000").json()["data"]
        paths += [f"/v1/cache/{branch['key']}/text" for branch in forest]
        for path in paths:
            if forms.in_bytes(http.get(path).content):
                found.append(f"{path} shows {person}")
        with http.stream("GET", "/v1/events") as events:
            if forms.in_bytes(next(events.iter_raw())):
                found.append(f"/v1/events shows {person}")
        # A similar prompt: the explanation of its miss would quote the earlier one.
        changed = [{"role": "system", "content": "You know all. " * 12}, *_without(person)]
        lookup = http.post("/v1/cache/lookup", json={"messages": changed})
        if forms.in_bytes(lookup.content):
            found.append(f"the lookup explains {person}")
    return found


def _without(person: Person) -> list[dict[str, Any]]:
    text = json.dumps(person.history).replace(person.word, "nothing")
    messages: list[dict[str, Any]] = json.loads(text)
    return messages


def left_in_archives(directory: Path, folder: Path, forms: Forms) -> list[str]:
    listed = cache("ls", "--json", directory=directory).json
    keys = [entry["key"] for entry in listed]
    if not keys:
        return []
    path = folder / "all.rk"
    done = cache("export", *keys, "-o", str(path), directory=directory)
    assert done.code == 0, done.output
    form = forms.in_bytes(path.read_bytes())
    return [f"{form} in an archive"] if form else []
