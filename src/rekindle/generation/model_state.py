"""Storable parts of a model's state: decided by `llama`, used by `engine` and `cache`."""

from dataclasses import dataclass
from enum import StrEnum

Payload = bytes | memoryview  # rows or a checkpoint, as the backend wrote them


class ModelClass(StrEnum):
    DENSE = "dense"  # rows only: any prefix of a slot can be kept
    SLIDING_WINDOW = "sliding_window"  # rows, and a window that exists at the end only
    HYBRID = "hybrid"  # rows and a recurrent state
    RECURRENT = "recurrent"  # a state without rows
    OPAQUE = "opaque"  # a state that can only be stored whole


@dataclass(frozen=True, slots=True)
class StateTraits:
    model_class: ModelClass
    has_rows: bool
    has_checkpoints: bool
    off_because: str | None = None  # why nothing can be stored; None: it can
    row_bytes: int = 0  # about, per position; 0: unknown, or no rows

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
        """Whether a sequence resumes only at a checkpoint, not at any row."""
        return self.has_checkpoints or not self.has_rows
