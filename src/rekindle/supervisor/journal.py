"""The requests that have not ended: what each has received, and which deaths it was part of.

After a death of the engine, the journal says how each request continues. A request that was in
the batch at two deaths without any progress is a suspect: it runs alone. At the third it fails.
"""

import secrets
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from rekindle.generation.events import (
    CacheSource,
    Embedded,
    Finished,
    PrefillProgress,
    PromptEvaluated,
    Spans,
    TokenEvent,
    TokenSampled,
)
from rekindle.generation.forgetting import Tombstone
from rekindle.generation.request import EmbeddingRequest, GenerationRequest, Resumed

SUSPECT_DEATHS = 2  # in a row without progress: the request runs alone
FATAL_DEATHS = 3  # the request fails
# Deaths in all, whatever progress was made between them. A reply that crashes the engine again
# and again, a few tokens later each time, must end too. Picked.
MOST_DEATHS = 32
INT32_MAX = 2**31 - 1


@dataclass(slots=True, eq=False)
class Unfinished:
    """A request of a client, and what the client has received."""

    request: GenerationRequest | EmbeddingRequest
    arrived_at: float
    reply: list[int] = field(default_factory=list)
    is_landing: bool = False  # the last token was forced, to end a call in time
    spans: Spans | None = None  # of the last report about the prompt
    is_evaluated: bool = False
    n_done: int = 0  # positions computed, the most in any life of the engine
    n_done_at_death: int = -1
    n_stuck_deaths: int = 0  # in a row, without progress between them
    n_deaths: int = 0
    is_sent: bool = False  # to the engine that runs now
    number: int = 0  # of the last time that it was sent
    n_taken_back: int = 0
    was_delayed: bool = False  # it could not be sent when it arrived, or was sent before

    def note(self, event: TokenEvent | Embedded) -> bool:
        """Take an event. Return False if the client has received it before a restart."""
        match event:
            case TokenSampled(token):
                self.reply.append(token)
                self.is_landing = event.lands
                self.n_done = self._n_prompt + len(self.reply)
            case PrefillProgress(n_done, _, _, spans):
                if self.is_evaluated:
                    return False
                self.spans = spans
                if n_done < self.n_done:
                    return False
                self.n_done = n_done
            case PromptEvaluated():
                if self.is_evaluated:
                    return False
                self.is_evaluated, self.spans = True, event.spans
                self.n_done = max(self.n_done, self._n_prompt)
            case Finished() | Embedded():
                self.n_done += 1
        return True

    @property
    def _n_prompt(self) -> int:
        return len(self.request.prompt) if isinstance(self.request, GenerationRequest) else 0

    @property
    def is_suspect(self) -> bool:
        return self.n_stuck_deaths >= SUSPECT_DEATHS and self.n_done <= self.n_done_at_death

    @property
    def is_fatal(self) -> bool:
        return self.n_stuck_deaths >= FATAL_DEATHS or self.n_deaths >= MOST_DEATHS

    def note_death(self) -> None:
        """Count a death of the engine with this request in its batch."""
        self.n_deaths += 1
        has_advanced = self.n_done > self.n_done_at_death
        self.n_stuck_deaths = 1 if has_advanced else self.n_stuck_deaths + 1
        self.n_done_at_death = self.n_done

    def suspect(self) -> None:
        """Let the request run alone: its prompt has crashed the engine.

        One more death before the first token of the reply fails it.
        """
        self.n_stuck_deaths, self.n_done_at_death = SUSPECT_DEATHS, self._n_prompt

    @property
    def may_be_restored(self) -> bool:
        """Whether stored rows may have been at fault: some were used, or nothing is known."""
        if self.spans is None or self.n_deaths > 1:  # later processes restored more
            return True
        return any(span.source is not CacheSource.LIVE for span in self.spans)

    @property
    def sent_id(self) -> str:
        """Return the id in the engine: the engine may not have cancelled the earlier one yet."""
        return f"{self.request.id}+{self.n_taken_back}" if self.n_taken_back else self.request.id

    def take_back(self) -> None:
        """Note a cancel order for a request that will be sent again."""
        self.is_sent, self.was_delayed = False, True
        self.n_taken_back += 1

    def as_sent(self) -> GenerationRequest | EmbeddingRequest:
        """Return the request as the engine gets it now: with what the client has received."""
        request = replace(self.request, id=self.sent_id, number=self.number)
        if isinstance(request, EmbeddingRequest) or not self.was_delayed:
            return request
        seconds = time.monotonic() - self.arrived_at
        resumed = Resumed(
            reply=tuple(self.reply),
            spans=self.spans,
            seconds=seconds,
            is_landing=self.is_landing,
        )
        return replace(request, resumed=resumed)

    def has_whole_reply(self, n_ctx: int) -> bool:
        """Return whether only the last event is missing."""
        request = self.request
        if isinstance(request, EmbeddingRequest) or not self.reply:
            return False
        most = n_ctx - len(request.prompt)
        if request.max_tokens is not None:
            most = min(most, request.max_tokens)
        return len(self.reply) >= most


class Journal:
    """The unfinished requests, in order of arrival, by id and by number."""

    def __init__(self) -> None:
        self._by_id: dict[str, Unfinished] = {}
        self._by_number: dict[int, Unfinished] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Unfinished]:
        return iter(list(self._by_id.values()))

    def __contains__(self, unfinished: Unfinished) -> bool:
        return self._by_id.get(unfinished.request.id) is unfinished

    def add(self, request: GenerationRequest | EmbeddingRequest) -> Unfinished:
        unfinished = self._by_id[request.id] = Unfinished(request, time.monotonic())
        return unfinished

    def number(self, unfinished: Unfinished, number: int) -> None:
        """Give the request a new number. Events with an earlier number are too late."""
        self._by_number.pop(unfinished.number, None)
        unfinished.number = number
        self._by_number[number] = unfinished

    def get(self, number: int) -> Unfinished | None:
        return self._by_number.get(number)

    def find(self, request_id: str) -> Unfinished | None:
        return self._by_id.get(request_id)

    def forget(self, tombstone: Tombstone) -> None:
        """Let what a deletion covers continue without the cache after a death of the engine."""
        for each in self:
            request = each.request
            if isinstance(request, GenerationRequest) and tombstone.covers(request.terms.owner):
                each.request = replace(request, cache_prompt=False)

    def remove(self, unfinished: Unfinished) -> None:
        """Harmless when repeated."""
        self._by_id.pop(unfinished.request.id, None)
        self._by_number.pop(unfinished.number, None)

    def note_death(self, numbers: Collection[int]) -> list[Unfinished]:
        """Count a death for each request that was in the batch. Return these."""
        for each in self:
            each.is_sent, each.was_delayed = False, True
        in_batch = [self._by_number[each] for each in numbers if each in self._by_number]
        for unfinished in in_batch:
            unfinished.note_death()
        return in_batch

    def wanted(self) -> list[Unfinished]:
        """Return the requests that the engine should have now.

        A suspect runs alone until it makes progress.
        """
        suspect = next((each for each in self if each.is_suspect), None)
        return [suspect] if suspect is not None else list(self)


def as_journaled(request: GenerationRequest, n_ctx: int) -> GenerationRequest:
    """Return the request with a seed, which the next process needs too, and with small numbers.

    Clients may send any integer, and messages hold 64 bits.
    """
    sampling = request.sampling
    seed = secrets.randbits(32) if sampling.seed is None else sampling.seed & 0xFFFFFFFF
    sampling = replace(
        sampling,
        seed=seed,
        top_k=min(sampling.top_k, INT32_MAX),
        repeat_last_n=min(sampling.repeat_last_n, INT32_MAX),
        dry_allowed_length=min(sampling.dry_allowed_length, INT32_MAX),
        dry_penalty_last_n=min(sampling.dry_penalty_last_n, INT32_MAX),
        min_keep=min(sampling.min_keep, INT32_MAX),
    )
    most = request.max_tokens if request.max_tokens is None else min(request.max_tokens, n_ctx)
    return replace(request, sampling=sampling, max_tokens=most)
