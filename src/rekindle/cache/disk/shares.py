"""How the disk budget is divided: entries, remembered turns, stored responses.

The two databases count their rows. SQLite's overhead, in the file and beside it, is part of their
share.
"""

from dataclasses import dataclass

# Turns and responses get a sixteenth each, and at most this; both picked.
SIDE_SHARE = 16
MAX_SIDE_BYTES = 256 * 2**20

MIN_LOG_BYTES, MAX_LOG_BYTES = 2**16, 4 * 2**20
BASE_BYTES = 96 * 2**10  # an empty file, and the index of its log
TURN_ROW_SHARE = 0.75  # of a full file: measured 0.83 to 0.97
RESPONSE_ROW_SHARE = 0.4  # a journal may hold a copy of every changed page; picked


@dataclass(frozen=True, slots=True)
class DiskShares:
    entries: int
    turns: int  # rows
    turn_log: int
    responses: int  # rows


def divide(disk_bytes: int) -> DiskShares:
    """Divide the disk budget."""
    side = min(disk_bytes // SIDE_SHARE, MAX_SIDE_BYTES)
    log = max(MIN_LOG_BYTES, min(side // 4, MAX_LOG_BYTES))
    return DiskShares(
        entries=disk_bytes - 2 * side,
        turns=max(0, int((side - log - BASE_BYTES) * TURN_ROW_SHARE)),
        turn_log=log,
        responses=max(0, int((side - BASE_BYTES) * RESPONSE_ROW_SHARE)),
    )
