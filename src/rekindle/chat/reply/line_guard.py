"""Ends a reply at a line: one with too little indentation, or the first after a time limit."""

import time

from rekindle.chat.reply.events import LineLimits


class LineGuard:
    def __init__(self, limits: LineLimits) -> None:
        self._limits = limits
        self._began_at: float | None = None
        self._indent: int | None = None  # of the line that begins; None: its text has begun
        self.is_over = False

    def feed(self, text: str) -> str:
        """Return the part of the text that the limits allow. `is_over`: the reply ends there."""
        now = time.monotonic()
        self._began_at = now if self._began_at is None else self._began_at
        if self._limits.n_indent:
            text = self._indented(text)
        seconds = self._limits.seconds
        if seconds and "\n" in text and now - self._began_at > seconds:
            self.is_over = True
        return text

    def _indented(self, text: str) -> str:
        for index, character in enumerate(text):
            if self._indent is not None and character in " \t":
                self._indent += 1
            elif self._indent is not None and self._indent < self._limits.n_indent:
                self.is_over = True
                return text[:index]
            else:
                self._indent = 0 if character == "\n" else None
        return text
