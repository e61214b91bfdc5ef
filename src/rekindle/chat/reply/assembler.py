"""Turns the sampled tokens of one reply into text, reasoning and calls, with their scores."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rekindle.chat.dialects.base import CallArguments, CallBegan, CallEnded, Dialect, ParsedCall
from rekindle.chat.dialects.syntax.lark import Schemas
from rekindle.chat.prompt.meaning import new_call_id
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.end_size import end_size
from rekindle.chat.reply.events import (
    LineLimits,
    ReplyCall,
    ReplyCallArguments,
    ReplyCallBegan,
    ReplyPart,
    ReplyReasoning,
    ReplyText,
    ScoredToken,
    TopToken,
)
from rekindle.chat.reply.line_guard import LineGuard
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
from rekindle.generation.request import LANDING_TOKENS
from rekindle.generation.tokenizer import Tokenizer

NO_LIMITS = LineLimits()
MAX_TRIMMED = 32  # tokens after the beginning of a stop string; picked


@dataclass(frozen=True, slots=True)
class ReplyReader:
    """How the text of a chat reply is parsed."""

    dialect: Dialect
    schemas: Schemas | None  # None: calls are not looked for
    begins_in_reasoning: bool
    bytes_of: Callable[[int], bytes]  # of a token; control tokens have none, unless they are marks
    streams_calls: bool = False  # a call that has begun will be finished
    max_tokens: int = 0  # of the reply

    def parser(self, n_tokens: Callable[[], int]) -> ReplyParser:
        """Return a parser. `n_tokens` returns how many tokens of the reply are known."""
        return ReplyParser(
            self.dialect,
            self.schemas,
            begins_in_reasoning=self.begins_in_reasoning,
            may_stream=lambda name: self._can_land(name, self.max_tokens - n_tokens()),
        )

    def _can_land(self, name: str, n_left: int) -> bool:
        """Return whether a call of the tool can still be finished near the end of the reply."""
        assert self.schemas is not None
        if not self.streams_calls:
            return False
        n_needed = end_size(self.schemas[name])
        return n_needed is not None and n_left >= LANDING_TOKENS + n_needed

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
        *,
        line_limits: LineLimits = NO_LIMITS,
        shows_tokens: bool = False,
    ) -> None:
        self.tokens: list[int] = []
        self.calls: list[ReplyCall] = []
        self.stop: str | None = None  # the stop string that ended the reply
        self.n_reasoning = 0  # tokens of reasoning, with its marks
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._parser = reader.parser(lambda: len(self.tokens)) if reader else None
        self._read = reader.read if reader else _as_text
        self._bytes_of = reader.bytes_of if reader else tokenizer.piece
        self._decoder = getincrementaldecoder("utf-8")("replace")  # holds back partial characters
        self._stops = StopScanner(stop)
        self._lines = LineGuard(line_limits) if line_limits != NO_LIMITS else None
        self._shows_tokens = shows_tokens
        self._n_shown = 0  # tokens that parts have carried
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._read_calls: list[ParsedCall] = []  # `calls` as the parser read them
        self._call_id = ""  # of the call that has begun
        self._is_forced = False  # the last token: it ends a call early
        self._n_undecided = 0  # tokens that may turn out to be the mark of reasoning
        self._n_characters = 0  # of the reply, shown or held back
        self._unsent: list[ScoredToken] = []
        self._is_finished = False  # nothing is held back any more

    def feed(self, event: TokenSampled) -> list[ReplyPart]:
        """Return everything that can be shown after this token."""
        self.tokens.append(event.token)
        self._is_forced = event.lands
        text = self._decoder.decode(self._bytes_of(event.token))
        if event.logprobs is not None:
            chosen = self._top_token(event.token, event.logprobs.logprob)
            top = tuple(self._top_token(token, value) for token, value in event.logprobs.top)
            self._unsent.append(ScoredToken(chosen, top, self._n_characters))
        self._n_characters += len(text)
        was_in_reasoning = self._is_in_reasoning
        parts = self._parsed(text)
        self._count_reasoning(parts, was_in_reasoning=was_in_reasoning)
        return self._shown(parts)

    def finish(self) -> list[ReplyPart]:
        """Return what was held back. A second call returns nothing."""
        if self._is_finished:
            return []
        self._is_finished = True
        parts = self._parsed(self._decoder.decode(b"", final=True))
        if self._parser is not None:
            parts += self._parser.finish()
        events = self._shown(parts)
        if self.stop is None:
            events += self._rest_of_text()
        return events

    @property
    def is_over(self) -> bool:
        """Whether a limit on lines has ended the reply."""
        return self._lines is not None and self._lines.is_over

    @property
    def is_broken(self) -> bool:
        """Whether a call was shown in part, and cannot be finished."""
        return self._parser is not None and self._parser.is_broken

    @property
    def said(self) -> ParsedReply:
        return ParsedReply("".join(self._reasoning), "".join(self._text), tuple(self._read_calls))

    @property
    def call_ids(self) -> list[str]:
        return [call.id for call in self.calls]

    def tokens_to_remember(self) -> list[int]:
        """Return the tokens without those after a stop string.

        Return nothing if the cut falls into a token, or if the reply ends in its reasoning or in
        a list of calls: the template would close them; the sampled tokens do not.
        """
        if self._parser is not None and (self._parser.is_in_reasoning or self._parser.is_unclosed):
            return []
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

    @property
    def _is_in_reasoning(self) -> bool:
        return self._parser is not None and self._parser.is_in_reasoning

    def _count_reasoning(self, parts: Sequence[Part], *, was_in_reasoning: bool) -> None:
        """Count the token that gave these parts. Tokens that begin an opening mark count too."""
        if was_in_reasoning or self._is_in_reasoning:
            self.n_reasoning += 1 + self._n_undecided
            self._n_undecided = 0
        else:
            self._n_undecided = 0 if parts else self._n_undecided + 1

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
                shown = scan.text if self._lines is None else self._lines.feed(scan.text)
                if shown or (scan.stop is not None and self._unsent):
                    self._text.append(shown)
                    yield ReplyText(shown, self._take_scored(), self._take_tokens())
            case ParsedReasoning(text):
                self._reasoning.append(text)
                yield ReplyReasoning(text, self._take_scored())
            case CallBegan(name, call_id):
                if self._stops.holds_text:  # no stop string continues behind a call
                    yield from self._rest_of_text()
                self._call_id = self._unused(call_id)
                scored = self._take_scored()
                yield ReplyCallBegan(len(self.calls), self._call_id, name, scored)
            case CallArguments(json):
                yield ReplyCallArguments(len(self.calls), json, self._take_scored())
            case CallEnded(read):
                self._read_calls.append(read)
                call = ReplyCall(
                    len(self.calls),
                    self._call_id,
                    read.name,
                    read.arguments_json,
                    self._take_scored(),
                    self._is_forced,
                )
                self.calls.append(call)
                yield call

    def _rest_of_text(self) -> Iterator[ReplyText]:
        """Yield the text that was held back, and scores that no part has carried."""
        text, scored = self._stops.flush(), self._take_scored()
        if text or scored:
            self._text.append(text)
            yield ReplyText(text, scored, self._take_tokens())

    def _unused(self, call_id: str) -> str:
        """Return the id that the model wrote. If it wrote none or a used one, return a new id."""
        if not call_id:
            return new_call_id()
        known = set(self.call_ids)
        if self._prompt.conversation is not None:
            messages = self._prompt.conversation.messages
            known |= {each.id for message in messages for each in message.calls}
        return new_call_id() if call_id in known else call_id

    def _top_token(self, token: int, logprob: float) -> TopToken:
        data = self._tokenizer.detokenize((token,), render_special=True)
        return TopToken(token, data.decode("utf-8", "replace"), data, logprob)

    def _take_scored(self) -> tuple[ScoredToken, ...]:
        if not self._unsent:
            return ()
        scored, self._unsent = tuple(self._unsent), []
        return scored

    def _take_tokens(self) -> tuple[int, ...]:
        if not self._shows_tokens:
            return ()
        tokens = tuple(self.tokens[self._n_shown :])
        self._n_shown = len(self.tokens)
        return tokens

    def _drop_scores(self, n_chars: int) -> None:
        """Drop the scores of tokens that lie wholly in the last characters of the reply."""
        while self._unsent and len(self._unsent[-1].chosen.text) <= n_chars:
            n_chars -= len(self._unsent.pop().chosen.text)


def _as_text(text: str) -> ParsedReply:
    return ParsedReply("", text, ())
