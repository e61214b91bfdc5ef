"""Protocol of a store for responses: `api` continues from them, `cache` keeps their bytes."""

from dataclasses import dataclass
from typing import Protocol

from rekindle.generation.forgetting import Owner, Tombstone


@dataclass(frozen=True, slots=True)
class StoredResponse:
    id: str
    created_at: int  # seconds since the epoch
    data: bytes
    owner: Owner


class ResponseStore(Protocol):
    """Any thread may call it. A lost, evicted or expired response is a miss."""

    def get(self, id: str) -> StoredResponse | None:
        """Return the response, or None. Blocks briefly. Raises TierFailed if the disk fails."""
        ...

    def ids(self, prefix: str) -> list[str]:
        """List the ids that begin so, sorted. `get` may find some of them expired or deleted.

        Blocks. Raises TierFailed if the disk fails.
        """
        ...

    def put(self, response: StoredResponse) -> None:
        """Store the response and return at once. Lookups find it now; the disk has it soon.

        A response whose owner is covered by a deletion is not stored.
        """
        ...

    def delete(self, id: str) -> bool:
        """Return whether there was one. Blocks. Raises TierFailed if it may still be on disk."""
        ...

    def forget(self, tombstone: Tombstone) -> int:
        """Delete the responses that it covers, also unwritten ones. Return how many. Blocks.

        Raises TierFailed if some of them may still be on disk.
        """
        ...

    def close(self) -> None:
        """Finish pending writes."""
        ...
