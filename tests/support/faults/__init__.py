"""Faults of an engine process that tests can order. The folder goes on the server's PYTHONPATH.

Production code knows nothing of this: Python imports `sitecustomize` in each process that it
starts, and only an engine process installs the faults. Each fault is a file in a folder.
"""

import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

FOLDER = Path(__file__).parent
ORDERS = "TEST_FAULTS"  # the variable that names the folder of ordered faults


class Moment(Enum):
    """A moment of a write to the cache at which the server and its engine die."""

    EMPTY_FILE = "the temporary file was made"
    HALF_A_FILE = "half of it was written"
    WHOLE_FILE = "all of it was, and it was not renamed yet"
    RENAMED = "it was renamed, and its row may be missing"
    REMOVED_ROW = "the row was removed, and its file was not yet"


class Faults:
    """The faults of one server, as the test orders them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    @property
    def environment(self) -> Mapping[str, str]:
        paths = (str(FOLDER), os.environ.get("PYTHONPATH", ""))
        return {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            ORDERS: str(self._folder),
        }

    def abort_on(self, token: int) -> None:
        """From now on, an engine aborts before it decodes a batch with this token."""
        self._order("token", str(token))

    def abort_at_start(self) -> None:
        """From now on, each engine aborts before its first batch, with which it warms up."""
        self._order("start", "")

    def die_at(self, moment: Moment) -> None:
        """The next write to the cache that comes to this moment ends server and engine."""
        self._order("moment", moment.name)

    def clear(self) -> None:
        for file in self._folder.iterdir():
            file.unlink()

    def _order(self, name: str, text: str) -> None:
        partial = self._folder / f"{name}.part"
        partial.write_text(text, "utf-8")
        partial.rename(self._folder / name)
