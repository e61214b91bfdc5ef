"""Find the earlier prompt that a prompt continues, also where its beginning was changed."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

from rekindle.chat.conversation import Message
from rekindle.chat.prompt.prompt import Prompt
from rekindle.lint.resent import RUN_TOKENS, n_resent
from rekindle.replay.floor import UNIT_BYTES, Floor, n_shared_units, units_of_tokens
from rekindle.replay.traffic import ReplayRequest

SKETCH_LINES = 128  # of a prompt, chosen by their hashes; picked
N_RECENT = 64  # prompts remembered for each line; picked
N_SIMILAR = 3  # prompts with the most lines in common that are compared; picked
MIN_SAME_SHARE = 0.5  # of the tokens: with fewer, it is another prompt; picked


@dataclass(frozen=True, slots=True)
class SentPrompt:
    """A request of the trace with its prompt."""

    request: ReplayRequest
    prompt: Prompt
    units: bytes  # its tokens, as `Floor` has them

    @property
    def n_tokens(self) -> int:
        return len(self.units) // UNIT_BYTES


@dataclass(frozen=True, slots=True)
class ContinuedPrompt:
    """What a server has to prefill, and what of it an earlier prompt had already."""

    n_prefilled: int
    earlier: SentPrompt | None  # the prompt that is continued
    n_shared: int = 0  # tokens of the common prefix with `earlier`
    n_resent: int = 0  # prefilled tokens that `earlier` has behind the common prefix


class SentPrompts:
    """All prompts of a trace so far."""

    def __init__(self) -> None:
        self._floor = Floor()
        self._sent: list[SentPrompt] = []
        self._by_units: dict[bytes, int] = {}
        self._by_conversation: dict[str, int] = {}
        self._by_line: dict[bytes, deque[int]] = {}

    @property
    def last(self) -> SentPrompt:
        return self._sent[-1]

    def add(self, request: ReplayRequest, prompt: Prompt) -> ContinuedPrompt:
        """Compare the prompt with the earlier ones, and add it to them."""
        sent = SentPrompt(request, prompt, units_of_tokens(prompt.tokens))
        lines = _sketch(prompt.text)
        continued = self._compare(sent, lines)
        index = len(self._sent)
        self._sent.append(sent)
        self._floor.learn(sent.units)
        self._by_units[sent.units] = self._by_conversation[request.conversation] = index
        for line in lines:
            self._by_line.setdefault(line, deque(maxlen=N_RECENT)).append(index)
        return continued

    def _compare(self, now: SentPrompt, lines: list[bytes]) -> ContinuedPrompt:
        n_prefilled = self._floor.n_new(now.units)
        suffix = now.units[(now.n_tokens - n_prefilled) * UNIT_BYTES :]
        best = ContinuedPrompt(n_prefilled, None)
        best_score = 0
        candidates = [self._sent[index] for index in dict.fromkeys(self._candidates(now, lines))]
        shared = [(each, n_shared_units(each.units, now.units)) for each in candidates]
        # An earlier prompt that begins this one is continued. A prompt that diverges before its
        # end is of another conversation, also where both have the same results of tools.
        n_grown = max((n for each, n in shared if n > each.n_tokens - RUN_TOKENS), default=0)
        for earlier, n_shared in shared:
            if earlier.n_tokens <= best_score or n_shared < n_grown:
                continue
            n_again = n_resent(earlier.units[n_shared * UNIT_BYTES :], suffix)
            if n_shared + n_again > best_score:
                best_score = n_shared + n_again
                best = ContinuedPrompt(n_prefilled, earlier, n_shared, n_again)
        if best.earlier is None or not _is_continued(best.earlier, now, best_score):
            return ContinuedPrompt(n_prefilled, None)
        return best

    def _candidates(self, now: SentPrompt, lines: list[bytes]) -> Iterator[int]:
        """Yield earlier prompts, likely ones first."""
        nearest = self._by_units.get(self._floor.nearest(now.units))
        if nearest is not None:
            yield nearest
        in_conversation = self._by_conversation.get(now.request.conversation)
        if in_conversation is not None:
            yield in_conversation
        if self._sent:
            yield len(self._sent) - 1
        n_common_lines = Counter(index for line in lines for index in self._by_line.get(line, ()))
        # Of prompts with equally many lines, the latest comes first.
        similar = sorted(n_common_lines, key=lambda index: (-n_common_lines[index], -index))
        yield from similar[:N_SIMILAR]


def is_elsewhere(earlier: SentPrompt, now: SentPrompt) -> bool:
    """Return whether the prompts are known to be of different conversations."""
    one, other = earlier.request, now.request
    return one.is_named and other.is_named and one.conversation != other.conversation


def _is_continued(earlier: SentPrompt, now: SentPrompt, n_same: int) -> bool:
    """Return whether enough tokens are the same. Else the later prompt only quotes the earlier.

    A prompt without the earlier one's tools is much shorter: its first message must be the same.
    """
    if n_same >= MIN_SAME_SHARE * earlier.n_tokens:
        return True
    return n_same >= MIN_SAME_SHARE * now.n_tokens and _first(earlier) == _first(now)


def _first(sent: SentPrompt) -> Message | None:
    conversation = sent.prompt.conversation
    return conversation.messages[0] if conversation and conversation.messages else None


def _sketch(text: str) -> list[bytes]:
    """Return hashes of some lines: those with the lowest hashes, so that prompts choose alike."""
    lines = {line.strip() for line in text.split("\n")} - {""}
    digests = (blake2b(line.encode("utf-8", "replace"), digest_size=8).digest() for line in lines)
    return sorted(digests)[:SKETCH_LINES]
