"""Splices remembered replies into raw text that begins with a prompt and its reply.

Raw text has no template and no marks where a reply ends. Replies are found by keys of the
text's prefixes of fixed lengths. The text is then compared up to the reply's last character.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple

from rekindle.chat.prompt.meaning import KEY_BYTES, digest
from rekindle.chat.prompt.token_run import PieceTokenizer, TokenRun
from rekindle.chat.prompt.turn_memory import Turn, TurnMemory
from rekindle.chat.reply.parser import ParsedReply
from rekindle.chat.template.guard import PromptPiece
from rekindle.generation.forgetting import Owner
from rekindle.generation.tokenizer import Tokenizer

# Steps between the lengths, the coarse one from FINE_LIMIT on. They are fine enough that texts
# with a long common beginning have different keys. All picked.
FINE_CHARS, FINE_LIMIT, COARSE_CHARS = 64, 65_536, 1024
MAX_BACK = 8  # tokens of a reply that may be dropped for a clean cut; picked
# Text around a cut, enough to see whether a token crosses it; picked.
CHARS_BEFORE, CHARS_BEHIND = 1024, 256


class TextSplicer:
    def __init__(self, memory: TurnMemory, tokenizer: Tokenizer, tokenize: PieceTokenizer) -> None:
        self._memory = memory
        self._tokenizer = tokenizer
        self._tokenize = tokenize
        letter = tokenizer.tokenize("a", parse_special=False)
        self._adds_space = tokenizer.detokenize(letter, render_special=True) == b" a"

    def splice(self, run: TokenRun, text: str, *, recalls: bool = True) -> list[Turn]:
        """Append the text's tokens to `run`. Return the turns that were spliced."""
        used: list[Turn] = []
        position = 0  # in the text; all text before it is in the run
        for turn in self._turns_in(text) if recalls else ():
            prompt_end = turn.gap_chars
            if prompt_end < position:
                continue
            tokens = self._tokens(text[position:prompt_end], inside=position > 0)
            if run.key([tokens]) != turn.prompt_key:
                continue
            cut = self._cut(turn, text)
            if cut is not None:
                run.extend(tokens)
                run.extend_sampled(turn.tokens[: cut.n_tokens])
                used.append(turn)
                position = cut.position
        run.extend(self._tokens(text[position:], inside=position > 0))
        return used

    def remember(self, run_key: bytes, prompt: str, tokens: Sequence[int], owner: Owner) -> None:
        text = self._text(tokens)
        whole = prompt + text
        if len(whole) < FINE_CHARS or "\ufffd" in text:
            return
        turn = Turn(
            prompt_key=run_key,
            gap_chars=len(prompt),
            tokens=tuple(tokens),
            said=ParsedReply("", text, ()),
        )
        self._memory.remember(turn, [*_keys(whole)][-1:], owner)

    def _turns_in(self, text: str) -> list[Turn]:
        """Return the turns whose prompt and reply begin the text, shortest first."""
        turns = {
            turn.id: turn
            for found in self._memory.find([*_keys(text)]).values()
            for turn in found
            if text.startswith(turn.said.text, turn.gap_chars)
        }
        return sorted(turns.values(), key=lambda turn: (turn.gap_chars, -len(turn.tokens)))

    def _tokens(self, text: str, *, inside: bool) -> "array[int]":
        if inside and self._adds_space:
            text = text.removeprefix(" ")  # the vocabulary adds it
        return self._tokenize(PromptPiece(text, parse_special=True)) if text else array("i")

    def _cut(self, turn: Turn, text: str) -> "_Cut | None":
        """Return the last place in the reply where tokenising the whole text also cuts."""
        end = turn.gap_chars + len(turn.said.text)
        start = max(0, end - CHARS_BEFORE)
        natural = self._token_ends(text[start : end + CHARS_BEHIND])
        n_before = len(_bytes(text[start:end]))
        dropped = b""
        for n_tokens in range(len(turn.tokens), max(0, len(turn.tokens) - MAX_BACK - 1), -1):
            if n_before - len(dropped) in natural and not _begins_inside_character(dropped):
                position = end - len(dropped.decode("utf-8", "replace"))
                if self._can_go_on(text[position : position + 2]):
                    return _Cut(n_tokens, position)
            last = turn.tokens[n_tokens - 1 : n_tokens]
            dropped = self._tokenizer.detokenize(last, render_special=True) + dropped
        return None

    def _can_go_on(self, text: str) -> bool:
        return not self._adds_space or not text or (text[0] == " " and len(text) > 1)

    def _token_ends(self, text: str) -> set[int]:
        """Return the byte offsets where tokens of the text end."""
        tokens = self._tokenizer.tokenize(text, parse_special=True)
        lengths = [len(self._tokenizer.detokenize((t,), render_special=True)) for t in tokens]
        return {length - self._adds_space for length in accumulate(lengths)}

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.detokenize(tokens, render_special=True).decode("utf-8", "replace")


class _Cut(NamedTuple):
    n_tokens: int  # of the reply that are kept
    position: int  # in the text


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _begins_inside_character(data: bytes) -> bool:
    return bool(data) and data[0] & 0xC0 == 0x80


def _keys(text: str) -> Iterator[bytes]:
    """Yield the keys of the text's beginnings, shortest first."""
    state = blake2b(digest_size=KEY_BYTES)
    start = 0
    lengths = [*range(FINE_CHARS, FINE_LIMIT, FINE_CHARS)]
    lengths += range(FINE_LIMIT, len(text) + 1, COARSE_CHARS)
    for length in lengths:
        if length > len(text):
            return
        state.update(_bytes(text[start:length]))
        yield digest(b"text", state.digest())
        start = length
