"""Deletions in random order with requests, running streams, kills and a second server.

    python -m tests.campaigns.deletion --rounds 50 --seed 1

After each round, nothing of the deleted people is left in a file, a store or a reply, and
everybody else's prompts are found. Equal seeds give equal rounds.
"""

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import httpx
import redis

from tests.support.cache_command import cache
from tests.support.deleted_texts import (
    Forms,
    Person,
    Talk,
    forms_of,
    left_in_files,
    left_in_routes,
    left_in_store,
    secret_word,
)
from tests.support.redis_server import redis_server
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

N_SERVERS = 2
N_PEOPLE = 4
SALTS = ("one", "two")
SETTLE_SECONDS = 30.0  # for streams, watchers and late writes; picked


class DeletionRounds:
    """Two servers of one directory, and of one store if there is one."""

    def __init__(
        self, model: Path, directory: Path, seed: int, store: redis.Redis | None, *options: str
    ) -> None:
        self._directory = directory
        self._store = store
        self._noise = random.Random(seed)
        self._arguments = (
            *(str(model), "--parallel", "4", "--ctx-size", "8192", "--threads", "1"),
            *("--cache-dir", str(directory), "--shutdown-grace", "0", *options),
        )
        self._servers: list[tuple[ServerProcess, ExitStack]] = []
        self._people: list[Person] = []
        self._deleted: list[Person] = []
        self._forms: dict[str, Forms] = {}
        self._streams: list[threading.Thread] = []

    def __enter__(self) -> "DeletionRounds":
        for _ in range(N_SERVERS):
            self._start_one()
        return self

    def __exit__(self, *_: object) -> None:
        for _server, stack in self._servers:
            stack.close()

    def run(self, n_rounds: int) -> None:
        for number in range(n_rounds):
            self._invite()
            steps = [self._talk] * 6 + [self._stream] * 3 + [self._kill]
            for step in self._noise.sample(steps, 6):
                step()
            self._delete()
            self._invite()
            for step in self._noise.sample([self._talk, self._kill, self._stream], 2):
                step()
            self._check(f"round {number}")

    def _start_one(self) -> None:
        stack = ExitStack()
        server = stack.enter_context(serve(*self._arguments))
        self._servers.append((server, stack))

    def _server(self) -> ServerProcess:
        return self._noise.choice(self._servers)[0]

    def _invite(self) -> None:
        while len(self._people) < N_PEOPLE:
            salt = SALTS[len(self._people) % len(SALTS)]
            person = Person(salt, f"s-{secret_word(self._noise)}", secret_word(self._noise))
            self._people.append(person)
            self._forms[person.word] = forms_of(self._server().url, person.word)

    def _talk(self) -> None:
        person = self._noise.choice(self._people)
        with closing(Talk(self._server().url, person)) as talk:
            self._noise.choice([talk.chat, talk.call_tool, talk.respond, talk.name_prompt])()

    def _stream(self) -> None:
        """Begin a reply, and let it end by itself, or with its server."""
        talk = Talk(self._server().url, self._noise.choice(self._people))
        running = talk.stream(self._noise.choice([50, 400, 1200]))
        next(running)
        thread = threading.Thread(target=_read_to_end, args=(talk, running), daemon=True)
        thread.start()
        self._streams.append(thread)

    def _kill(self) -> None:
        server, stack = self._servers.pop(self._noise.randrange(len(self._servers)))
        server.kill()
        stack.close()
        self._start_one()

    def _delete(self) -> None:
        person = self._noise.choice(self._people)
        scope = self._noise.choice(["session", "namespace", "all"])
        covered = [
            each
            for each in self._people
            if scope == "all"
            or (each.salt == person.salt and (scope == "namespace" or each is person))
        ]
        if scope == "all" and self._noise.random() < 0.3:
            done = cache("forget", "--all", "--yes", directory=self._directory)
            assert done.code == 0, done.output
        else:
            query = {"session": {"session": person.session}, "all": {"scope": "all"}}
            reply = httpx.delete(
                f"{self._server().url}/v1/cache",
                params=query.get(scope, {}),
                headers=person.headers,
                timeout=120,
            )
            assert reply.status_code == 200, reply.text
            assert reply.json()["unreached"] == []
        self._people = [each for each in self._people if each not in covered]
        self._deleted += covered

    def _check(self, moment: str) -> None:
        for thread in self._streams:
            thread.join(SETTLE_SECONDS)
        self._streams.clear()
        for person in self._deleted:
            forms = self._forms[person.word]
            places: list[Callable[[], list[str]]] = [partial(left_in_files, self._directory, forms)]
            places += [
                partial(left_in_routes, server.url, person, forms) for server, _ in self._servers
            ]
            if self._store is not None:
                places.append(partial(left_in_store, self._store, forms))
            for left in places:
                _wait_until_empty(left, f"{moment}: {person}")
        for person in self._people:
            with closing(Talk(self._server().url, person)) as talk:
                talk.chat()
                assert talk.chat() > 0, f"{moment}: {person} is not found any more"


def _read_to_end(talk: Talk, running: Iterator[bytes]) -> None:
    with suppress(httpx.HTTPError), closing(talk):
        for _ in running:
            pass


def _wait_until_empty(left: Callable[[], list[str]], whose: str) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while found := left():
        assert time.monotonic() < deadline, f"{whose}: {found}"
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--redis", action="store_true", help="share a store between the servers")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        home = Path(folder)
        model = write_tiny_model(home / "model.gguf", TinyArchitecture.LLAMA)
        store, options = None, []
        if given.redis:
            server = stack.enter_context(redis_server(home))
            store = stack.enter_context(server.client())
            options = ["--cache-shared", server.url]
        with DeletionRounds(model, home / "cache", given.seed, store, *options) as rounds:
            rounds.run(given.rounds)


if __name__ == "__main__":
    main()
