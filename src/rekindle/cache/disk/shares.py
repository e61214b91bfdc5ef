"""How the disk budget is divided: entries, remembered turns, stored responses.

The two databases count their rows. What SQLite adds to those, in the file and beside it, is part
of their share.
"""

from dataclasses import dataclass

SIDE_SHARE = 16  # turns and responses get a sixteenth each, and no more than this; both picked
MAX_SIDE_BYTES = 256 * 2**20

MIN_LOG_BYTES, MAX_LOG_BYTES = 2**16, 4 * 2**20
BASE_BYTES = 96 * 2**10  # an empty file, and the index of its log
TURN_ROW_SHARE = 0.75  # of a full file: measured 0.83 to 0.97
RESPONSE_ROW_SHARE = 0.4  # there may be a journal of all that is changed in the file; picked


@dataclass(frozen=True, slots=True)
class DiskShares:
    entries: int
    turns: int  # rows
    turn_log: int
    responses: int  # rows


def divide(disk_bytes: int) -> DiskShares:
    side = min(disk_bytes // SIDE_SHARE, MAX_SIDE_BYTES)
    log = max(MIN_LOG_BYTES, min(side // 4, MAX_LOG_BYTES))
    return DiskShares(
        entries=disk_bytes - 2 * side,
        turns=max(0, int((side - log - BASE_BYTES) * TURN_ROW_SHARE)),
        turn_log=log,
        responses=max(0, int((side - BASE_BYTES) * RESPONSE_ROW_SHARE)),
    )
