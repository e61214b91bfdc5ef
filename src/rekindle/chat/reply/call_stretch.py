"""The calls from one trigger on: their parts are passed on at once, or when each call is whole."""

from collections.abc import Callable, Iterator

from rekindle.chat.dialects.base import (
    CallArguments,
    CallBegan,
    CallEnded,
    CallPart,
    CallReader,
)


class CallStretch:
    """Passes on the parts of calls. `may_stream` is asked for each tool that is called."""

    def __init__(self, reader: CallReader, may_stream: Callable[[str], bool]) -> None:
        self.has_calls = False  # a whole call was passed on
        self.is_open = False  # a call was passed on in part
        self._reader = reader
        self._may_stream = may_stream
        self._kept: CallBegan | None = None  # the beginning of a call that does not stream

    @property
    def is_done(self) -> bool:
        return self._reader.is_done

    @property
    def rest(self) -> str:
        """The text after the calls. If the reader has failed: after the last whole call."""
        return self._reader.rest

    def feed(self, text: str) -> Iterator[CallPart]:
        """Yield the parts that can be passed on now. Raises NotACall."""
        yield from self._passed(self._reader.feed(text))

    def finish(self) -> Iterator[CallPart]:
        """Yield the last parts: no more text comes. Raises NotACall, CutOff within a call."""
        yield from self._passed(self._reader.finish())

    def _passed(self, parts: list[CallPart]) -> Iterator[CallPart]:
        for part in parts:
            match part:
                case CallBegan(name):
                    self.is_open = self._may_stream(name)
                    self._kept = None if self.is_open else part
                case CallEnded(call):
                    if self._kept is not None:
                        yield self._kept
                        yield CallArguments(call.arguments_json)
                    self.has_calls, self.is_open, self._kept = True, False, None
                    yield part
                    continue
                case CallArguments():
                    pass
            if self.is_open:
                yield part
