"""Protocol of a model's vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class InfillMarks:
    """Tokens around the parts of a prompt that fills in the middle. None: there is no such one."""

    prefix: int | None = None
    suffix: int | None = None
    middle: int | None = None
    repository: int | None = None
    separator: int | None = None  # before each file


NO_INFILL = InfillMarks()


class Tokenizer(Protocol):
    """The model's vocabulary. Any thread may use it."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def special_strings(self) -> tuple[str, ...]:
        """The text of every control token."""
        ...

    @property
    def end_strings(self) -> tuple[str, ...]:
        """The text of every token that ends a turn."""
        ...

    @property
    def bos_text(self) -> str: ...

    @property
    def eos_text(self) -> str: ...

    @property
    def bos_token(self) -> int | None:
        """The token that starts every prompt, or None if this model wants none."""
        ...

    @property
    def infill(self) -> InfillMarks: ...

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """Return the text's tokens alone. Without `parse_special`, control strings are text."""
        ...

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to visible text: none for control tokens."""
        ...

    def detokenize(self, tokens: Sequence[int], *, render_special: bool) -> bytes: ...
