"""Sessions: their ledgers, their bound, and which requests of an agent are asides."""

import pytest

from rekindle.chat.accounts.sessions import Ledger, Session, Sessions, rank_for
from rekindle.chat.conversation import Conversation, Message, Role, Text, Tool
from rekindle.generation.request import Rank

TOOLS = (Tool("look", "{}"),)
ASKED = Conversation((Message(Role.USER, (Text("?"),)),))
ANSWERED = Conversation((*ASKED.messages, Message(Role.ASSISTANT, (Text("!"),)), *ASKED.messages))
WITH_TOOLS = Conversation(ASKED.messages, TOOLS)


def test_the_least_recently_used_session_is_dropped_first() -> None:
    sessions = Sessions(max_sessions=2)
    for name in ("a", "b", "a", "c"):
        sessions.use("", name, asked_at=0)
    assert [each.id for each in sessions.list("")] == ["c", "a"]


def test_a_session_id_of_another_namespace_is_another_session() -> None:
    sessions = Sessions()
    sessions.use("one", "a", asked_at=0).ledger += Ledger(requests=1)
    assert sessions.use("two", "a", asked_at=0).ledger == Ledger()
    assert [each.namespace for each in sessions.list("one")] == ["one"]


def test_entries_add_up_and_the_oldest_session_is_dropped() -> None:
    sessions = Sessions(max_sessions=1)
    entry = Ledger(
        requests=1,
        prompt_tokens=10,
        cached_tokens=4,
        prefilled_tokens=6,
        prefilled_twice_tokens=2,
    )
    for name in ("a", "b", "b"):
        sessions.use("", name, asked_at=0).ledger += entry
    [left] = sessions.list("")
    assert left.ledger == entry + entry


@pytest.mark.parametrize("declared", list(Rank))
def test_a_declared_class_wins(declared: Rank) -> None:
    agent = Session("", "a", has_used_tools=True)
    assert rank_for(agent, ASKED, max_tokens=10, declared=declared) is declared


@pytest.mark.parametrize(
    ("conversation", "max_tokens", "rank"),
    [
        (ASKED, None, Rank.BACKGROUND),  # a title: no tools, nothing said yet
        (ASKED, 0, Rank.BACKGROUND),
        (ANSWERED, 64, Rank.BACKGROUND),  # a summary of what was said
        (ANSWERED, 65, Rank.MAIN),
        (ANSWERED, 0, Rank.MAIN),  # priming
        (ANSWERED, None, Rank.MAIN),
        (WITH_TOOLS, 10, Rank.MAIN),
        (None, 10, Rank.MAIN),
    ],
)
def test_side_requests_are_recognised_by_missing_tools_and_replies(
    conversation: Conversation | None, max_tokens: int | None, rank: Rank
) -> None:
    agent, chatter = Session("", "a", has_used_tools=True), Session("", "b")
    assert rank_for(agent, conversation, max_tokens=max_tokens, declared=None) is rank
    assert rank_for(chatter, conversation, max_tokens=max_tokens, declared=None) is Rank.MAIN
