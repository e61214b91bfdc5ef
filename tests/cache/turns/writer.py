"""A server's turns in a process of its own: `python -m tests.cache.turns.writer DIRECTORY FIRST N`.

Keeps turns, and prints the number and the time of each once `keep` has returned.
"""

import sys
import time
from contextlib import closing
from pathlib import Path

from rekindle.cache.turns.database import TurnDatabase
from rekindle.generation.forgetting import Owner, Tombstones
from rekindle.generation.stored_turns import StoredTurn
from tests.cache.entries import MODEL

OWNER = Owner(namespace="", session="default", asked_at=1.0)


def make_turn(
    number: int, *, n_bytes: int = 400, n_keys: int = 2, owner: Owner = OWNER
) -> StoredTurn:
    """Equal arguments give equal turns, in every process."""
    text = number.to_bytes(4, "big")
    keys = (b"key".ljust(11) + bytes([n]) + text for n in range(n_keys))
    data = (text * n_bytes)[:n_bytes]
    return StoredTurn(b"turn".ljust(12) + text, tuple(keys), data, owner)


def main() -> None:
    directory, first, n_turns = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with closing(TurnDatabase(directory, fingerprint=MODEL, forgotten=Tombstones())) as turns:
        for number in range(first, first + n_turns):
            turns.keep(make_turn(number))
            print(number, time.time(), flush=True)  # noqa: T201
            time.sleep(0.0005)


if __name__ == "__main__":
    main()
