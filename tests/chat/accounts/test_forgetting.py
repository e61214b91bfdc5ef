"""Deletion of sessions, recent prompts and computed prefixes."""

import numpy as np

from rekindle.chat.accounts.accounts import Account, Accounts
from rekindle.chat.accounts.recent_prompts import past_prompt
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.events import ReplyOptions
from rekindle.chat.reply.parser import ParsedReply
from rekindle.generation.events import PromptEvaluated
from rekindle.generation.forgetting import Scope, Tombstone, Tombstones
from rekindle.generation.request import CacheTerms, Sampling

TOKENS = tuple(range(64))
SAID = ParsedReply("", "", ())


class Server:
    def __init__(self) -> None:
        self.forgotten = Tombstones()
        self.accounts = Accounts(self.forgotten)

    def begin(self, session: str, *, at: float, namespace: str = "") -> Account:
        terms = CacheTerms(namespace=namespace, session=session, asked_at=at)
        asked = past_prompt(Prompt(TOKENS, (), "the secret"), terms, model="m", reply_id=session)
        options = ReplyOptions(sampling=Sampling(), terms=terms)
        return self.accounts.open(asked, options, str, can_store=True, n_ctx=512)

    def serve(self, session: str, *, at: float, namespace: str = "") -> Account:
        account = self.begin(session, at=at, namespace=namespace)
        end(account)
        return account

    def forget(self, scope: Scope, *, at: float) -> int:
        tombstone = Tombstone(scope=scope, at=at)
        self.forgotten.add(tombstone)
        return self.accounts.forget(tombstone)

    def sessions(self, namespace: str = "") -> list[str]:
        return [each.id for each in self.accounts.sessions.list(namespace)]

    def has_prompt(self, session: str, namespace: str = "") -> bool:
        return self.accounts.recent.named(namespace, session) is not None


def end(account: Account) -> None:
    account.settle(
        PromptEvaluated(n_prompt=len(TOKENS), n_cached=0, queue_seconds=0, prefill_seconds=0)
    )
    account.close(len(TOKENS), (), SAID, ())


def test_a_deletion_drops_sessions_and_prompts_of_its_scope() -> None:
    server = Server()
    for session, namespace in (("ann", ""), ("bob", ""), ("ann", "other")):
        server.serve(session, at=1.0, namespace=namespace)
    assert server.forget(Scope(namespace="", session="ann"), at=2.0) == 2
    assert (server.sessions(), server.sessions("other")) == (["bob"], ["ann"])
    assert not server.has_prompt("ann")
    assert server.has_prompt("bob")
    assert server.has_prompt("ann", "other")
    assert server.forget(Scope(), at=2.0) == 4
    assert server.sessions() == server.sessions("other") == []


def test_a_request_that_ends_after_its_deletion_adds_nothing() -> None:
    server = Server()
    running = server.begin("ann", at=1.0)
    server.forget(Scope(namespace=""), at=2.0)
    end(running)
    server.serve("ann", at=1.5)  # it waited for its turn meanwhile
    assert server.sessions() == []
    assert not server.has_prompt("ann")
    server.serve("ann", at=3.0)
    assert server.sessions() == ["ann"]
    assert server.has_prompt("ann")


def test_a_deleted_prefix_does_not_count_as_computed_before() -> None:
    server = Server()
    server.serve("ann", at=1.0)
    server.serve("ann", at=1.0, namespace="other")
    again = server.serve("ann", at=1.5)
    assert again.n_recomputed > 0
    server.forget(Scope(namespace=""), at=2.0)
    assert server.serve("bob", at=3.0).n_recomputed == 0
    assert server.serve("bob", at=3.0, namespace="other").n_recomputed > 0
    assert server.serve("bob", at=3.0).n_recomputed > 0
    assert np.count_nonzero(server.accounts.seen._table)  # only digests are left
