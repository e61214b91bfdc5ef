"""The allowed tokens of a prompt, derived without the code that builds prompts.

The oracle notes every computed prompt and reply. The tokens of a prompt are right if each part has
one of two origins. An assistant message may be a reply with the same meaning, computed after
exactly the tokens in front of it. All other tokens come from the template's text.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product

from rekindle.chat.conversation import Conversation, Message, Reasoning, Role
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.parser import ParsedReply
from rekindle.chat.template.guard import PromptPiece
from rekindle.config.choices import ReasoningHistory
from rekindle.generation.tokenizer import Tokenizer
from tests.support.turn_bench import Exchange, TurnBench

MARKS = {"at_head": "\x11", "at_body": "\x12", "at_end": "\x13"}
SWITCH = "preserve_thinking"


@dataclass(frozen=True)
class Computed:
    prompt: tuple[int, ...]
    opening: str  # of the turn: the generation prompt
    reply: tuple[int, ...]
    said: ParsedReply

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.reply


@dataclass(frozen=True)
class Region:
    """One assistant message in the rendered text."""

    head: int
    body: int
    end: int


class Oracle:
    def __init__(self, bench: TurnBench) -> None:
        self._bench = bench
        self._known: dict[PromptPiece, list[int]] = {}
        self.computed: list[Computed] = []

    def note(self, conversation: Conversation, exchange: Exchange) -> Computed:
        marked = self._text(conversation, MARKS)
        opening = marked.rpartition(MARKS["at_head"])[2]
        noted = Computed(exchange.prompt.tokens, opening, exchange.tokens, exchange.said)
        self.computed.append(noted)
        return noted

    def check(self, conversation: Conversation, prompt: Prompt) -> None:
        plain = self.plain(conversation)
        if not prompt.remembered:
            assert prompt.tokens == plain, "nothing was spliced, and yet it is not the plain text"
            return
        reasons = []
        for chosen in self._choices(conversation, prompt):
            try:
                expected = self._expected(conversation, chosen)
            except Unexplained as reason:
                reasons.append(f"{sorted(chosen)}: {reason}")
                continue
            if expected == prompt.tokens:
                return
            reasons.append(f"{sorted(chosen)}: {self._difference(expected, prompt.tokens)}")
        raise AssertionError("\n".join(["no explanation", *reasons]))

    def check_edited(self, conversation: Conversation, prompt: Prompt, word: str) -> None:
        """The client put `word` into a message: it is in the prompt if the template shows it."""
        shown, expected = (
            self._bench.tokenizer.detokenize(tokens, render_special=True).decode()
            for tokens in (prompt.tokens, self.plain(conversation))
        )
        assert shown.count(word) == expected.count(word), f"{word} is answered from old tokens"

    def plain(self, conversation: Conversation) -> tuple[int, ...]:
        pieces = self._pieces(conversation)
        return (*self._bos(pieces), *(t for piece in pieces for t in self._tokens(piece)))

    def restores(self, conversation: Conversation, index: int) -> bool:
        """Whether this message gets reasoning back that the client or the template left out."""
        match self._bench.history:
            case ReasoningHistory.KEEP:
                return True
            case ReasoningHistory.TEMPLATE:
                return False
            case ReasoningHistory.AUTO:
                return index > last_user(conversation)

    def _choices(
        self, conversation: Conversation, prompt: Prompt
    ) -> Iterator[Mapping[int, Computed]]:
        options: list[list[tuple[int, Computed] | None]] = []
        for index, message in enumerate(conversation.messages):
            if message.role is Role.ASSISTANT:
                fitting = [
                    (index, computed)
                    for computed in self.computed
                    if prompt.tokens[: len(computed.tokens)] == computed.tokens
                    and _same(message, computed.said)
                ]
                options.append([None, *fitting])
        for choice in product(*options):
            chosen = dict(item for item in choice if item is not None)
            if len(chosen) == len(prompt.remembered):
                yield chosen

    def _expected(
        self, conversation: Conversation, chosen: Mapping[int, Computed]
    ) -> tuple[int, ...]:
        restored = {i: said for i, said in chosen.items() if self.restores(conversation, i)}
        shown = _restored(conversation, restored)
        pieces = self._pieces(shown)
        text = "".join(piece.text for piece in pieces)
        regions = self._regions(shown)
        tokens = self._bos(pieces)
        position = 0
        for index, computed in chosen.items():
            region = regions[index]
            body = text[region.body : region.end]
            self._check_body(body, computed.said, restores=index in restored)
            opened = text.startswith(computed.opening, region.head)
            nearly = text.startswith(computed.opening.rstrip(), region.head)
            if not nearly and index not in restored:
                raise Unexplained(f"message {index} does not begin with {computed.opening!r}")
            if opened:
                before = _cut(pieces, position, region.head + len(computed.opening))
            else:
                opening = PromptPiece(computed.opening, parse_special=True)
                before = [*_cut(pieces, position, region.head), opening]
            tokens += [token for piece in before for token in self._tokens(piece)]
            if tuple(tokens) != computed.prompt:
                raise Unexplained(f"message {index} comes after another prompt")
            tokens += computed.reply
            position = region.end
        rest = _cut(pieces, position, len(text))
        return (*tokens, *(token for piece in rest for token in self._tokens(piece)))

    def _check_body(self, body: str, said: ParsedReply, *, restores: bool) -> None:
        words = [said.text.strip()]
        for call in said.calls:
            words += [call.name, *_leaves(json.loads(call.arguments_json))]
        if missing := [word for word in words if not _is_written(word, body)]:
            raise Unexplained(f"{missing} is not in {body!r}")
        reasoning = said.reasoning.strip()
        if not restores and reasoning not in body:
            raise Unexplained(f"the template does not show {reasoning!r} in {body!r}")

    def _regions(self, conversation: Conversation) -> dict[int, Region]:
        marked = self._text(conversation, MARKS)
        places = [match.start() - i for i, match in enumerate(re.finditer("[\x11-\x13]", marked))]
        triples = zip(places[::3], places[1::3], places[2::3], strict=False)
        indexes = [i for i, m in enumerate(conversation.messages) if m.role is Role.ASSISTANT]
        assert re.sub("[\x11-\x13]", "", marked) == self._text(conversation)
        assert len(places) == 3 * len(indexes) + 1
        return {i: Region(*triple) for i, triple in zip(indexes, triples, strict=True)}

    def _text(self, conversation: Conversation, kwargs: Mapping[str, str] | None = None) -> str:
        return "".join(piece.text for piece in self._pieces(conversation, kwargs or {}))

    def _pieces(
        self, conversation: Conversation, kwargs: Mapping[str, str] | None = None
    ) -> Sequence[PromptPiece]:
        has_switch = SWITCH in self._bench.template.source
        is_kept = self._bench.history is not ReasoningHistory.TEMPLATE
        switches = {SWITCH: True} if has_switch and is_kept else {}
        kwargs = {} if kwargs is None else kwargs
        shown = replace(
            conversation, template_kwargs={**switches, **conversation.template_kwargs, **kwargs}
        )
        return self._bench.template.render(shown, add_generation_prompt=True)

    def _tokens(self, piece: PromptPiece) -> list[int]:
        if piece not in self._known:
            tokenize = self._bench.tokenizer.tokenize
            self._known[piece] = tokenize(piece.text, parse_special=piece.parse_special)
        return self._known[piece]

    def _bos(self, pieces: Sequence[PromptPiece]) -> list[int]:
        tokenizer = self._bench.tokenizer
        bos = tokenizer.bos_token
        has_one = "".join(piece.text for piece in pieces).startswith(tokenizer.bos_text)
        return [] if bos is None or has_one else [bos]

    def _difference(self, expected: Sequence[int], tokens: Sequence[int]) -> str:
        at = _n_shared(expected, tokens)
        shown = [
            self._bench.tokenizer.detokenize(each[max(0, at - 5) : at + 20], render_special=True)
            for each in (expected, tokens)
        ]
        return f"at {at}: expected {shown[0]!r}, got {shown[1]!r}"


class RawOracle:
    """The same for raw text: known tokens in front, and the plain tokens of what follows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._computed: list[tuple[tuple[int, ...], int]] = []  # tokens, and the prompt's number

    def note(self, prompt: Prompt, reply: Sequence[int]) -> None:
        self._computed.append(((*prompt.tokens, *reply), len(prompt.tokens)))

    def check(self, text: str, prompt: Prompt) -> None:
        data = self._data(prompt.tokens)
        plain = tuple(self._plain(text))
        added = self._data(self._plain("a")).removesuffix(b"a")
        assert data == added + text.encode()
        if not prompt.remembered:
            assert prompt.tokens == plain
            return
        natural = self._ends(plain)
        for known, n_prompt in self._computed:
            n_same = _n_shared(known, prompt.tokens)
            for n_known in range(n_same, n_prompt, -1):
                n_bytes = len(self._data(known[:n_known]))
                rest = data[n_bytes:].removeprefix(added).decode("utf-8", "replace")
                if prompt.tokens[n_known:] == tuple(self._plain(rest)) and n_bytes in natural:
                    return
        raise AssertionError(f"no explanation of {self._shown(prompt.tokens)} for {text!r}")

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.tokenize(text, parse_special=True) if text else []

    def _ends(self, tokens: Sequence[int]) -> set[int]:
        return set(accumulate(len(self._data((token,))) for token in tokens))

    def _data(self, tokens: Sequence[int]) -> bytes:
        return self._tokenizer.detokenize(tokens, render_special=True)

    def _shown(self, tokens: Sequence[int]) -> list[bytes]:
        return [self._data((token,)) for token in tokens]


def last_user(conversation: Conversation) -> int:
    """The index of the message that began the tool loop; -1: none."""
    users = [i for i, m in enumerate(conversation.messages) if m.role is Role.USER]
    return max(users, default=-1)


def _n_shared(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


class Unexplained(Exception):
    pass


def _same(message: Message, said: ParsedReply) -> bool:
    reasoning, text = message.reasoning.strip(), message.text.strip()
    if not reasoning and (inline := re.fullmatch("<think>(.*?)</think>(.*)", text, re.DOTALL)):
        reasoning, text = inline[1].strip(), inline[2].strip()
    calls = [(call.name, _typed(json.loads(call.arguments_json))) for call in message.calls]
    return (
        text == said.text.strip()
        and reasoning in ("", said.reasoning.strip())
        and calls == [(c.name, _typed(json.loads(c.arguments_json))) for c in said.calls]
    )


def _typed(value: object) -> object:
    """Python takes True for 1, which is another argument. 1.0 is not."""
    match value:
        case dict():
            return {key: _typed(item) for key, item in value.items()}
        case list():
            return [_typed(item) for item in value]
        case bool() | str() | None:
            return type(value), value
        case _:
            return value


def _leaves(value: object) -> Iterator[str]:
    match value:
        case dict():
            for key, item in value.items():
                yield key
                yield from _leaves(item)
        case str():
            yield value
        case _:
            yield json.dumps(value)


def _is_written(word: str, body: str) -> bool:
    spellings = (word, json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1])
    return any(spelling in body for spelling in spellings)


def _restored(conversation: Conversation, chosen: Mapping[int, Computed]) -> Conversation:
    """Restore the reasoning of these spliced messages only."""
    messages = list(conversation.messages)
    for index, computed in chosen.items():
        message = messages[index]
        inline = message.text.strip().startswith("<think>")
        if computed.said.reasoning and not message.reasoning and not inline:
            parts = (Reasoning(computed.said.reasoning), *message.parts)
            messages[index] = replace(message, parts=parts)
    return replace(conversation, messages=tuple(messages))


def _cut(pieces: Sequence[PromptPiece], start: int, stop: int) -> list[PromptPiece]:
    parts = []
    offset = 0
    for piece in pieces:
        text = piece.text[max(start - offset, 0) : max(stop - offset, 0)]
        if text:
            parts.append(piece._replace(text=text))
        offset += len(piece.text)
    return parts
