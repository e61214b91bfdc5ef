"""`rekindle serve` that is imported in advance.

    python -m tests.support.standby_server serve MODEL ...

Importing takes longer than all else of a start. Then it waits for a line on its standard input
and serves.
"""

import sys

import rekindle.server.serving  # noqa: F401
from rekindle.cli import main

if __name__ == "__main__" and sys.stdin.readline():
    main()
