"""Counts the tokens of a reply's reasoning, and closes it at the limit."""

from codecs import getincrementaldecoder

from rekindle.generation.request import GrammarStart, ReasoningLimit
from rekindle.llama.grammar.lazy import TriggerScanner
from rekindle.llama.tokenizer.vocabulary import Vocabulary

MAX_REOPENED = 3  # spans that are opened after the budget was spent; picked


class ReasoningBudget:
    """Follows one reply. Its state follows from the reply's tokens."""

    def __init__(self, limit: ReasoningLimit, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._closing = limit.closing.strip().encode()
        start = GrammarStart(
            quiet=(limit.opening.strip(), limit.closing.strip()),
            quiet_anywhere=limit.anywhere,
            begins_quiet=limit.begins_inside,
        )
        self._scanner = TriggerScanner(start)
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._opening = limit.opening.strip().encode()
        self._n_left = limit.max_tokens
        self._n_reopened = 0
        self._written = b""  # the part of the closing mark that the reply ends with
        self._tokens_of(self._closing)  # the first call may be slow

    def forced(self) -> int | None:
        """Return the next token of the closing mark if the budget is spent.

        A character that is cut between tokens is completed first.
        """
        is_cut, _ = self._decoder.getstate()
        if not self.is_spent or is_cut:
            return None
        tokens = self._tokens_of(self._closing[len(self._written) :])
        return tokens[0] if tokens else None

    @property
    def is_spent(self) -> bool:
        return self._scanner.is_quiet and self._n_left <= 0

    @property
    def may_not_open(self) -> bool:
        """Whether the model keeps opening its reasoning, though the budget is spent."""
        return self._n_reopened >= MAX_REOPENED and not self._scanner.is_quiet

    def opens(self, token: int) -> bool:
        """Return whether the reasoning would begin with this token."""
        piece = self._vocabulary.detokenize([token], render_special=True)
        return self._scanner.would_hold(self._opening, piece)

    def accept(self, token: int) -> None:
        was_inside = self._scanner.is_quiet
        data = piece = self._vocabulary.detokenize([token], render_special=True)
        self._decoder.decode(data)
        while piece:
            n_scanned = self._scanner.n_bytes
            if self._scanner.feed(piece) is None:
                break
            piece = piece[self._scanner.n_bytes - n_scanned :]
        if not self._scanner.is_quiet:
            self._written = b""
        elif was_inside:
            self._n_left -= 1
            self._written = _overlap(self._written + data, self._closing)
        elif self._n_left <= 0:
            self._n_reopened += 1

    def _tokens_of(self, text: bytes) -> list[int]:
        """Return tokens with exactly this text, none of which ends the turn.

        Some vocabularies begin every text with a space.
        """
        tokens = self._vocabulary.tokenize(text.decode("utf-8", "replace"), parse_special=True)
        is_exact = self._vocabulary.detokenize(tokens, render_special=True) == text
        if is_exact and self._vocabulary.eog_tokens.isdisjoint(tokens):
            return tokens
        return self._vocabulary.tokenize_bytes(text) or []


def _overlap(text: bytes, mark: bytes) -> bytes:
    """Return the longest end of the text that the mark begins with."""
    n_most = min(len(text), len(mark) - 1)
    return next((mark[:n] for n in range(n_most, 0, -1) if text.endswith(mark[:n])), b"")
