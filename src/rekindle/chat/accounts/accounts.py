"""Records of past requests, and the account of each new one."""

from collections.abc import Sequence

import numpy as np

from rekindle.chat.accounts.miss_reasons import CacheOutcome, Diagnosis, TextOf, explain
from rekindle.chat.accounts.recent_prompts import PastPrompt, RecentPrompts, with_reply
from rekindle.chat.accounts.seen_prefixes import GRAIN, SeenPrefixes
from rekindle.chat.accounts.sessions import Ledger, Session, Sessions, rank_for
from rekindle.chat.accounts.window_watch import watched
from rekindle.chat.reply.events import ReplyOptions
from rekindle.chat.reply.parser import ParsedReply
from rekindle.generation.events import PromptEvaluated
from rekindle.generation.forgetting import Tombstone, Tombstones
from rekindle.generation.request import Rank
from rekindle.generation.status import Forecast
from rekindle.observe.request_record import Miss


class Accounts:
    """Sessions, computed prefixes and recent prompts since the start, of all models."""

    def __init__(self, forgotten: Tombstones) -> None:
        self._forgotten = forgotten
        self.sessions = Sessions()
        self.seen = SeenPrefixes()
        self.recent = RecentPrompts()

    def open(
        self,
        asked: PastPrompt,
        options: ReplyOptions,
        text_of: TextOf,
        *,
        can_store: bool,
        n_ctx: int,
    ) -> "Account":
        owner = asked.owner
        if self.is_deleted(asked):
            session = Session(owner.namespace or "", owner.session or "")  # in no list
        else:
            session = self.sessions.use(
                owner.namespace or "", owner.session or "", asked_at=owner.asked_at
            )
        declared = _declared(options)
        rank = rank_for(
            session, asked.conversation, max_tokens=options.max_tokens, declared=declared
        )
        if asked.conversation is not None and asked.conversation.callable_tools:
            session.has_used_tools = True
        return Account(
            self, session, rank, asked, options, text_of, can_store=can_store, n_ctx=n_ctx
        )

    def is_deleted(self, asked: PastPrompt) -> bool:
        """Return whether a deletion covers the request: nothing of it may be stored."""
        return self._forgotten.cover(asked.owner)

    def forecast_miss(self, asked: PastPrompt, forecast: Forecast, text_of: TextOf) -> Miss | None:
        """Return the miss that a request with this prompt would report if it were sent now."""
        n_known = self.seen.n_known(self.space(asked), asked.tokens)
        earlier = self.recent.most_like(asked, n_cached=forecast.n_cached)
        return explain(
            asked, earlier, CacheOutcome(n_cached=forecast.n_cached, n_known=n_known), text_of
        )

    def forget(self, tombstone: Tombstone) -> int:
        """Drop sessions and prompts that the deletion covers. Return how many."""
        return self.sessions.forget(tombstone) + self.recent.forget(tombstone)

    def space(self, asked: PastPrompt) -> str:
        """Return the name of the space in which equal tokens have equal rows.

        A deletion begins another space: what was computed before it counts as new.
        """
        owner = asked.owner
        return f"{owner.namespace}\0{asked.model}\0{self._forgotten.last_at(owner.namespace or '')}"

    def add(self, past: PastPrompt) -> None:
        """Record a computed prompt, unless a deletion covers it."""
        if not self.is_deleted(past):
            self.seen.add(self.space(past), past.tokens)
            self.recent.add(past)


class Account:
    """The account of one request: settled when its prompt is evaluated, closed at its end."""

    def __init__(
        self,
        accounts: Accounts,
        session: Session,
        rank: Rank,
        asked: PastPrompt,
        options: ReplyOptions,
        text_of: TextOf,
        *,
        can_store: bool,
        n_ctx: int,
    ) -> None:
        self.session = session.id
        self.model = asked.model
        self.owner = asked.owner
        self.rank = rank
        self.is_explained = options.explain
        self.media_omitted = options.media_omitted
        self.n_recomputed = 0
        self.diagnosis = Diagnosis()
        self._accounts = accounts
        self._session = session
        self._asked = asked
        self._options = options
        self._text_of = text_of
        self._can_store = can_store
        self._n_ctx = n_ctx

    def settle(self, event: PromptEvaluated) -> Diagnosis:
        """Record what the prompt cost. Return why no more of it was cached."""
        n_known = self._accounts.seen.n_known(self._accounts.space(self._asked), self._asked.tokens)
        self.n_recomputed = max(min(n_known, event.n_prompt - 1) - event.n_cached, 0)
        self._session.ledger += Ledger(
            requests=1,
            prompt_tokens=event.n_prompt,
            cached_tokens=event.n_cached,
            prefilled_tokens=event.n_prompt - event.n_cached,
            prefilled_twice_tokens=self.n_recomputed,
        )
        found = CacheOutcome(
            n_cached=event.n_cached,
            n_known=n_known,
            n_refused=event.n_refused,
            n_missing_checkpoint_tokens=event.n_missing_checkpoint_tokens,
            uses_cache=self._options.cache_prompt,
            can_store=self._can_store,
        )
        self.diagnosis = self._diagnosis(found)
        return self.diagnosis

    def close(
        self, n_computed: int, reply: Sequence[int], said: ParsedReply, call_ids: Sequence[str]
    ) -> None:
        """Record the tokens that were computed.

        `n_computed` counts prompt and reply. The last token is often sampled but not computed.
        """
        if not self._options.cache_prompt or n_computed < GRAIN:
            return
        sampled = np.fromiter(reply, np.int32, len(reply))
        computed = np.concatenate((self._asked.tokens, sampled))[:n_computed]
        past = with_reply(self._asked, computed, said, call_ids)
        earlier = self._accounts.recent.continued_by(self._asked)
        self._accounts.add(watched(past, earlier, n_ctx=self._n_ctx))

    def _diagnosis(self, found: CacheOutcome) -> Diagnosis:
        recent, compare_with = self._accounts.recent, self._options.compare_with
        named = None
        if compare_with is not None:
            named = recent.named(self._asked.namespace, compare_with)
        earlier = named or recent.most_like(self._asked, n_cached=found.n_cached)
        miss = explain(self._asked, earlier, found, self._text_of)
        return Diagnosis(miss, is_compared=compare_with is None or named is not None)


def _declared(options: ReplyOptions) -> Rank | None:
    if options.rank is not None:
        return options.rank
    return None if options.terms.rank is Rank.MAIN else options.terms.rank
