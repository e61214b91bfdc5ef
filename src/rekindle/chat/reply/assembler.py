"""Turns the sampled tokens of one reply into text, reasoning and calls, with their scores."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rekindle.chat.dialects.base import Dialect, ParsedCall
from rekindle.chat.dialects.syntax.lark import Schemas
from rekindle.chat.prompt.meaning import new_call_id
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.events import (
    ReplyCall,
    ReplyPart,
    ReplyReasoning,
    ReplyText,
    ScoredToken,
    TopToken,
)
from rekindle.chat.reply.parser import (
    ParsedReasoning,
    ParsedReply,
    ParsedText,
    Part,
    ReplyParser,
    parse,
)
from rekindle.chat.reply.stop_strings import StopScanner
from rekindle.generation.events import TokenSampled
from rekindle.generation.tokenizer import Tokenizer

MAX_TRIMMED = 32  # tokens after the beginning of a stop string; picked


@dataclass(frozen=True, slots=True)
class ReplyReader:
    """How the text of a chat reply is parsed."""

    dialect: Dialect
    schemas: Schemas | None  # None: calls are not looked for
    begins_in_reasoning: bool
    bytes_of: Callable[[int], bytes]  # of a token; control tokens have none, unless they are marks

    def parser(self) -> ReplyParser:
        return ReplyParser(self.dialect, self.schemas, begins_in_reasoning=self.begins_in_reasoning)

    def read(self, text: str) -> ParsedReply:
        return parse(self.dialect, self.schemas, text, begins_in_reasoning=self.begins_in_reasoning)


class ReplyAssembler:
    """Assembles one reply. Feed each sampled token, then finish. `reader` None: raw text."""

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: Tokenizer,
        reader: ReplyReader | None,
        stop: tuple[str, ...],
    ) -> None:
        self.tokens: list[int] = []
        self.calls: list[ReplyCall] = []
        self.stop: str | None = None  # the stop string that ended the reply
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._parser = reader.parser() if reader else None
        self._read = reader.read if reader else _as_text
        self._bytes_of = reader.bytes_of if reader else tokenizer.piece
        self._decoder = getincrementaldecoder("utf-8")("replace")  # holds back partial characters
        self._stops = StopScanner(stop)
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._read_calls: list[ParsedCall] = []  # `calls` as the parser read them
        self._n_characters = 0  # of the reply, shown or held back
        self._unsent: list[ScoredToken] = []
        self._is_finished = False  # nothing is held back any more

    def feed(self, event: TokenSampled) -> list[ReplyPart]:
        """Return everything that can be shown after this token."""
        self.tokens.append(event.token)
        text = self._decoder.decode(self._bytes_of(event.token))
        if event.logprobs is not None:
            chosen = self._top_token(event.token, event.logprobs.logprob)
            top = tuple(self._top_token(token, value) for token, value in event.logprobs.top)
            self._unsent.append(ScoredToken(chosen, top, self._n_characters))
        self._n_characters += len(text)
        return self._shown(self._parsed(text))

    def finish(self) -> list[ReplyPart]:
        """Return what was held back. A second call returns nothing."""
        if self._is_finished:
            return []
        self._is_finished = True
        parts = self._parsed(self._decoder.decode(b"", final=True))
        if self._parser is not None:
            parts += self._parser.finish()
        events = self._shown(parts)
        if self.stop is not None:
            return events
        text = self._stops.flush()
        scored = self._take_scored()
        if text or scored:
            self._text.append(text)
            events.append(ReplyText(text, scored))
        return events

    @property
    def said(self) -> ParsedReply:
        return ParsedReply("".join(self._reasoning), "".join(self._text), tuple(self._read_calls))

    @property
    def call_ids(self) -> list[str]:
        return [call.id for call in self.calls]

    def tokens_to_remember(self) -> list[int]:
        """Return the tokens without those after a stop string.

        Return nothing if the cut falls into a token, or if the reply ends in its reasoning.
        """
        if self._parser is not None and self._parser.is_in_reasoning:
            return []  # the template would close the reasoning; the sampled tokens do not
        if self.stop is None:
            return self.tokens
        said = self.said
        tokens = list(self.tokens)
        while tokens and len(self.tokens) - len(tokens) <= MAX_TRIMMED:
            text = b"".join(map(self._bytes_of, tokens)).decode("utf-8", "replace")
            if self._read(text) == said:
                return tokens
            tokens.pop()
        return []

    def _parsed(self, text: str) -> list[Part]:
        if self._parser is not None:
            return self._parser.feed(text)
        return [ParsedText(text)] if text else []

    def _shown(self, parts: Sequence[Part]) -> list[ReplyPart]:
        """Process all parts at once: a client that stops reading must not change the turn."""
        events: list[ReplyPart] = []
        for part in parts:
            events += self._events(part)
            if self.stop is not None:
                break
        return events

    def _events(self, part: Part) -> Iterator[ReplyPart]:
        match part:
            case ParsedText(text):
                scan = self._stops.feed(text)
                if scan.stop is not None:
                    self.stop = scan.stop
                    self._drop_scores(scan.n_cut)
                if scan.text or (scan.stop is not None and self._unsent):
                    self._text.append(scan.text)
                    yield ReplyText(scan.text, self._take_scored())
            case ParsedReasoning(text):
                self._reasoning.append(text)
                yield ReplyReasoning(text, self._take_scored())
            case ParsedCall(name, arguments_json):
                index, call_id = len(self.calls), self._call_id(part)
                self._read_calls.append(part)
                call = ReplyCall(index, call_id, name, arguments_json, self._take_scored())
                self.calls.append(call)
                yield call

    def _call_id(self, call: ParsedCall) -> str:
        """Return the id that the model wrote. If it wrote none or a used one, return a new id."""
        if not call.id:
            return new_call_id()
        known = set(self.call_ids)
        if self._prompt.conversation is not None:
            messages = self._prompt.conversation.messages
            known |= {each.id for message in messages for each in message.calls}
        return new_call_id() if call.id in known else call.id

    def _top_token(self, token: int, logprob: float) -> TopToken:
        data = self._tokenizer.detokenize((token,), render_special=True)
        return TopToken(token, data.decode("utf-8", "replace"), data, logprob)

    def _take_scored(self) -> tuple[ScoredToken, ...]:
        if not self._unsent:
            return ()
        scored, self._unsent = tuple(self._unsent), []
        return scored

    def _drop_scores(self, n_chars: int) -> None:
        """Drop the scores of tokens that lie wholly in the last characters of the reply."""
        while self._unsent and len(self._unsent[-1].chosen.text) <= n_chars:
            n_chars -= len(self._unsent.pop().chosen.text)


def _as_text(text: str) -> ParsedReply:
    return ParsedReply("", text, ())
