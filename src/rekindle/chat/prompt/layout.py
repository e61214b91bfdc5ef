"""A rendered conversation that can be cut at any character."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from rekindle.chat.template.guard import Guard, PromptPiece


class Layout:
    """Rendered text and its pieces. Offsets are in characters of `text`."""

    def __init__(self, pieces: Sequence[PromptPiece], guard: Guard) -> None:
        self.text = "".join(piece.text for piece in pieces)
        self._guard = guard
        self._pieces = pieces
        self._starts = [0, *accumulate(len(piece.text) for piece in pieces)][:-1]
        self._controls = [
            (start, control)
            for start, piece in zip(self._starts, pieces, strict=True)
            if (control := guard.control_string(piece))
        ]
        self._control_starts = [start for start, _ in self._controls]

    def cut(self, start: int, stop: int) -> list[tuple[int, PromptPiece]]:
        """Return the pieces of a part of the text, each with its offset."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        parts = []
        for index in range(first, len(self._pieces)):
            offset, piece = self._starts[index], self._pieces[index]
            if offset >= stop:
                break
            if offset < start or offset + len(piece.text) > stop:
                begin = max(start - offset, 0)
                piece = piece._replace(text=piece.text[begin : stop - offset])
                offset += begin
            if piece.text:
                parts.append((offset, piece))
        return parts

    def followed_by(self, text: str, start: int, stop: int) -> list[tuple[int, PromptPiece]]:
        """Return the pieces of a part of the text, as if the template had written `text` next."""
        parts = self.cut(start, stop)
        more = list(self._guard.pieces(text, self._guard.sentinel(text)))
        if parts and more and not self._guard.control_string(more[0]):
            offset, last = parts.pop()
            more[0] = last._replace(text=last.text + more[0].text)
            return [*parts, (offset, more[0]), *((stop, piece) for piece in more[1:])]
        return parts + [(stop, piece) for piece in more]

    def controls(self, start: int) -> Iterator[tuple[int, str]]:
        """Yield offset and text of the template's control strings from `start` on."""
        for index in range(bisect_left(self._control_starts, start), len(self._controls)):
            yield self._controls[index]
