"""Prompts for a reciting model, as token ids, with the reply that each must get.

A reciting model continues its cycle from the last token of the prompt, whatever stands before.
Therefore the prompt decides how good a draft can be:

    rewrite  the prompt holds the reply in pieces of about ten tokens, each with a wrong token at
             its end, so a draft from it is right about nine times in ten
    again    the same prompt a second time: the earlier reply is known to the server
    prose    no token of the reply stands in any prompt or reply before
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from bench.models.reciter import Recital

PIECE_TOKENS = range(5, 16)  # of the reply between two wrong tokens: 10 on average
# Tokens with which a piece repeats the end of the piece before. A draft by the last few tokens
# then finds its place again right behind a wrong token.
OVERLAP_TOKENS = 4
NOISE_TOKENS = 64  # of an instruction; picked
NOISE_SHARE = 4  # one in so many tokens of the cycle is never recited, only used as noise


class Kind(StrEnum):
    REWRITE = "rewrite"
    AGAIN = "again"
    PROSE = "prose"


@dataclass(frozen=True, slots=True)
class Recitation:
    kind: Kind
    prompt: list[int]
    reply: list[int]
    reply_text: str


class NotEnoughTokens(ValueError):
    """The cycle is too short: a reply would hold tokens of another one."""


class Recitations:
    """The prompts of all rounds. Rounds share no token, except those of the noise."""

    def __init__(self, recital: Recital, n_reply: int) -> None:
        self._recital = recital
        self._n_reply = n_reply
        n_noise = len(recital.tokens) // NOISE_SHARE
        self._n_recited = len(recital.tokens) - n_noise
        self._noise = recital.stretch(self._n_recited, n_noise)

    def round(self, number: int) -> Iterator[Recitation]:
        rewrite = self._recitation(Kind.REWRITE, 2 * number)
        yield rewrite
        yield Recitation(Kind.AGAIN, rewrite.prompt, rewrite.reply, rewrite.reply_text)
        yield self._recitation(Kind.PROSE, 2 * number + 1)

    def _recitation(self, kind: Kind, place: int) -> Recitation:
        n_each = OVERLAP_TOKENS + self._n_reply
        start = place * n_each + OVERLAP_TOKENS
        if start + self._n_reply > self._n_recited:
            raise NotEnoughTokens(
                f"{self._n_recited} tokens can be recited, and {start + self._n_reply} are needed:"
                " use fewer rounds, shorter replies or a larger vocabulary."
            )
        choose = random.Random(f"{kind} {place}")
        noise = choose.choices(self._noise, k=NOISE_TOKENS)
        before = self._recital.stretch(start - OVERLAP_TOKENS, OVERLAP_TOKENS)
        if kind is Kind.PROSE:
            prompt = [*noise, before[-1]]
        else:
            middle = NOISE_TOKENS // 2
            prompt = [*noise[:middle], *self._file(start, choose), *noise[middle:], *before]
        return Recitation(
            kind,
            prompt,
            self._recital.stretch(start, self._n_reply),
            self._recital.text(start, self._n_reply),
        )

    def _file(self, start: int, choose: random.Random) -> list[int]:
        """Return the reply in pieces that overlap, with a wrong token behind each.

        The last piece comes first. The last place that holds the tokens of an overlap is then the
        piece that ends with them, so no drafter avoids its wrong token.
        """
        pieces: list[list[int]] = []
        place, end = start, start + self._n_reply
        while place < end:
            stop = min(place + choose.choice(PIECE_TOKENS), end)
            begin = place - OVERLAP_TOKENS
            copied = self._recital.stretch(begin, stop - begin)
            pieces.append([*copied, choose.choice(self._noise)])
            place = stop
        return [token for piece in reversed(pieces) for token in piece]
