"""What of a model's state can be stored: decided by `llama`, used by `engine` and `cache`."""

from dataclasses import dataclass
from enum import StrEnum

Payload = bytes | memoryview  # rows or a checkpoint, as the backend wrote them


class ModelClass(StrEnum):
    DENSE = "dense"  # rows only: any prefix of a slot can be kept
    SLIDING_WINDOW = "sliding_window"  # rows, and a window that only exists at the end
    HYBRID = "hybrid"  # rows, and a recurrent state
    RECURRENT = "recurrent"  # a state and no rows
    OPAQUE = "opaque"  # a state that can only be taken whole


@dataclass(frozen=True, slots=True)
class StateTraits:
    model_class: ModelClass
    has_rows: bool
    has_checkpoints: bool
    off_because: str | None = None  # why nothing may be stored; None: it may
    row_bytes: int = 0  # of one position, about; 0: not known, or there are none

    @property
    def is_dense(self) -> bool:
        return self.model_class is ModelClass.DENSE

    @property
    def can_fork(self) -> bool:
        """Return whether a slot's rows can be shared with another slot.

        An opaque state would be copied. Without support for storing, a slot can only continue.
        """
        return self.off_because is None and self.model_class is not ModelClass.OPAQUE

    @property
    def resumes_at_checkpoints(self) -> bool:
        """Not everywhere, as rows alone would allow."""
        return self.has_checkpoints or not self.has_rows
