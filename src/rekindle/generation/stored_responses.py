"""The seam between `api`, which keeps responses to go on from, and `cache`, which keeps bytes."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoredResponse:
    id: str
    created_at: int  # seconds since the epoch
    data: bytes


class ResponseStore(Protocol):
    """Any thread may call it. What was lost, evicted or has expired is not there."""

    def get(self, id: str) -> StoredResponse | None:
        """Blocks for a moment; TierFailed where the disk cannot say."""
        ...

    def put(self, response: StoredResponse) -> None:
        """Returns at once and never fails; it is found from now on, and is on disk soon."""
        ...

    def delete(self, id: str) -> bool:
        """Whether it was there. Blocks; TierFailed where it may still be on disk."""
        ...

    def close(self) -> None:
        """Writes what is still on its way."""
        ...
