"""The last prompts with their replies, to find what a new prompt changed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

import numpy as np

from rekindle.bounded_cache import BoundedCache
from rekindle.chat.accounts.seen_prefixes import GRAIN, Tokens
from rekindle.chat.conversation import Conversation, Message, Role
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.parser import ParsedReply
from rekindle.generation.forgetting import Owner, Tombstone
from rekindle.generation.request import DEFAULT_SESSION, CacheTerms

MAX_BYTES = 64 << 20  # all of these are picked
MAX_PROMPTS = 512
MAX_PER_SESSION = 8
MAX_COMPARED = 32
COMPARED_TOKENS = 4096  # compared in one step: most prompts diverge early
MESSAGE_BYTES = 256  # estimate for a message without its text


@dataclass(frozen=True, slots=True, eq=False)
class PastPrompt:
    """A prompt, and its reply once there is one."""

    tokens: Tokens  # all computed tokens
    n_prompt: int  # the tokens before the reply
    text: str  # of the prompt, without the reply
    conversation: Conversation | None
    digests: tuple[int, ...]  # one per message, without its reasoning
    model: str
    owner: Owner
    reply_id: str | None = None  # a client may name the prompt by it
    n_asked: int = 0  # messages before the reply
    is_warned: bool = False  # that its conversation outgrows the context

    @property
    def namespace(self) -> str | None:
        return self.owner.namespace

    @property
    def session(self) -> str | None:
        return self.owner.session

    def begins(self, digests: tuple[int, ...]) -> bool:
        """Return whether the messages continue this prompt; its reply may have been rewritten.

        The default session may hold several clients. There, they must have a reply in common.
        """
        n_asked, n_all = self.n_asked, len(self.digests)
        if self.conversation is None or self.digests[:n_asked] != digests[:n_asked]:
            return False
        if self.session != DEFAULT_SESSION:
            return n_asked > 0
        asked = self.conversation.messages[:n_asked]
        has_reply = n_all > n_asked and self.digests == digests[:n_all]
        return has_reply or any(message.role is Role.ASSISTANT for message in asked)

    @property
    def n_bytes(self) -> int:
        # The conversation holds the text a second time.
        return self.tokens.nbytes + 2 * len(self.text) + MESSAGE_BYTES * len(self.digests)


def past_prompt(
    prompt: Prompt, terms: CacheTerms, *, model: str, reply_id: str | None = None
) -> PastPrompt:
    """Return the prompt as a past one. Takes milliseconds for a long prompt."""
    conversation = prompt.conversation
    messages = conversation.messages if conversation else ()
    return PastPrompt(
        np.fromiter(prompt.tokens, np.int32, len(prompt.tokens)),
        len(prompt.tokens),
        prompt.text,
        conversation,
        message_digests(messages),
        model,
        terms.owner,
        reply_id,
        len(messages) - (conversation is not None and conversation.continue_last),
    )


def with_reply(
    past: PastPrompt, computed: Tokens, said: ParsedReply, call_ids: Sequence[str]
) -> PastPrompt:
    """Return the past prompt with its reply, as a client would send it back."""
    if past.conversation is None or said == ParsedReply("", "", ()):
        return replace(past, tokens=computed)
    conversation = past.conversation.with_reply(
        said.text, said.tool_calls(call_ids), reasoning=said.reasoning
    )
    *before, reply = conversation.messages
    digests = (*past.digests[: len(before)], _digest(reply))
    return replace(past, tokens=computed, conversation=conversation, digests=digests)


class RecentPrompts:
    """The last prompts, bounded in bytes, and in prompts per session."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._prompts = BoundedCache[int, PastPrompt](max_items=MAX_PROMPTS, max_bytes=max_bytes)
        self._numbers = count()

    def add(self, past: PastPrompt) -> None:
        of_session = [
            number
            for number, each in self._prompts.items()
            if (each.namespace, each.session) == (past.namespace, past.session)
        ]
        if len(of_session) == MAX_PER_SESSION:
            self._prompts.pop(of_session[0])
        self._prompts.put(next(self._numbers), past, n_bytes=past.n_bytes)

    def forget(self, tombstone: Tombstone) -> int:
        """Drop the prompts that the deletion covers. Return how many."""
        covered = [n for n, each in self._prompts.items() if tombstone.covers(each.owner)]
        for number in covered:
            self._prompts.pop(number)
        return len(covered)

    def named(self, namespace: str | None, reply_id: str) -> PastPrompt | None:
        return next((p for p in self._of_namespace(namespace) if p.reply_id == reply_id), None)

    def continued_by(self, past: PastPrompt) -> PastPrompt | None:
        """Return the newest prompt of the session that this one continues."""
        of_session = self.of_session(past.namespace, past.session, model=past.model)
        return next((each for each in of_session if each.begins(past.digests)), None)

    def of_session(
        self, namespace: str | None, session: str | None, *, model: str
    ) -> list[PastPrompt]:
        """Return the prompts of a session, newest first."""
        return [
            each
            for each in self._of_namespace(namespace)
            if (each.session, each.model) == (session, model)
        ]

    def most_like(self, past: PastPrompt, *, n_cached: int = 0) -> PastPrompt | None:
        """Return the most similar prompt: first of its own session, then the newest.

        A prompt that shares less than was cached cannot explain the miss, and is skipped.
        """
        best: PastPrompt | None = None
        best_likeness = (0, False)
        for each in islice(self._of_namespace(past.namespace), MAX_COMPARED):
            likeness = (_likeness(each, past), each.session == past.session)
            if likeness[0] and likeness > best_likeness and _can_explain(each, past, n_cached):
                best, best_likeness = each, likeness
        return best

    def _of_namespace(self, namespace: str | None) -> Iterator[PastPrompt]:
        return (each for each in reversed(self._prompts.values()) if each.namespace == namespace)


def n_shared(a: Tokens, b: Tokens) -> int:
    """Return the length of the common prefix."""
    n = min(len(a), len(b))
    for start in range(0, n, COMPARED_TOKENS):
        stop = min(start + COMPARED_TOKENS, n)
        [different] = np.nonzero(a[start:stop] != b[start:stop])
        if different.size:
            return start + int(different[0])
    return n


def _likeness(a: PastPrompt, b: PastPrompt) -> int:
    """Return the number of equal messages, or of shared tokens for raw prompts; 0: unlike."""
    if a.conversation is None or b.conversation is None:
        return n_shared(a.tokens, b.tokens) if a.conversation is b.conversation else 0
    n_equal = sum(x == y for x, y in zip(a.digests, b.digests, strict=False))
    return n_equal and n_equal + (a.conversation.tools == b.conversation.tools)


def _can_explain(earlier: PastPrompt, now: PastPrompt, n_cached: int) -> bool:
    if earlier.model != now.model:
        return True
    return n_shared(earlier.tokens, now.tokens) > n_cached - GRAIN


def message_digests(messages: Iterable[Message]) -> tuple[int, ...]:
    return tuple(map(_digest, messages))


def _digest(message: Message) -> int:
    calls = tuple((call.name, call.arguments_json) for call in message.calls)
    results = tuple(result.text for result in message.results)
    return hash((message.role, message.text.strip(), calls, results))
