"""Protocol of a model's vocabulary."""

from collections.abc import Sequence
from typing import Protocol


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

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """Return the text's tokens alone. Without `parse_special`, control strings are text."""
        ...

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to visible text: none for control tokens."""
        ...

    def detokenize(self, tokens: Sequence[int], *, render_special: bool) -> bytes: ...
