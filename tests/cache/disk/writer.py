"""A server's disk tier in a process of its own: `python -m tests.cache.disk.writer ...`.

Puts entries for ever, or as many as it is told, and prints each key once its put has returned.
With a share above 0 it also reads what it or another process may have written.
"""

import argparse
import random
import sys
from contextlib import closing
from pathlib import Path

from rekindle.errors import EntryMissing
from tests.cache.entries import make_entry, open_tier


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--entries", type=int, default=sys.maxsize)
    parser.add_argument("--distinct", type=int, default=sys.maxsize)
    parser.add_argument("--payload-bytes", type=int, default=300_000)
    parser.add_argument("--budget-bytes", type=int, default=2**30)
    parser.add_argument("--read-share", type=float, default=0.0)
    options = parser.parse_args()
    noise = random.Random(options.seed)
    with closing(open_tier(options.directory, budget_bytes=options.budget_bytes)) as tier:
        print("open", flush=True)  # noqa: T201
        for n in range(options.entries):
            seed = (options.seed + n) % options.distinct
            entry = make_entry(seed, payload_bytes=options.payload_bytes)
            tier.put(entry)
            print(entry.header.key.hex(), flush=True)  # noqa: T201
            if noise.random() < options.read_share:
                wanted = make_entry(
                    noise.randrange(options.distinct), payload_bytes=options.payload_bytes
                )
                try:
                    assert tier.get(wanted.header.key) == wanted
                except EntryMissing:
                    continue
                print("found", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
