"""Whole workloads: a server computes at most 1.02 times the tokens that are new.

`pytest -s` prints a table of them.
"""

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.clear_replies import COUNTING
from tests.support.server_process import ServerProcess, Start, launch, serve, start_fast
from tests.support.tiny_models import TinyArchitecture
from tests.support.tiny_vocabulary import no_words
from tests.support.workloads import (
    SEARCH_TOOL,
    TABLE_HEAD,
    Account,
    Message,
    ReferenceFloor,
    Traffic,
    assistant,
    listing,
    prose,
    system,
    tool_round,
    user,
)

MAX_AMPLIFICATION = 1.02


class Served(NamedTuple):
    """A model, and memory for four of its blocks: 1,066 tokens."""

    arguments: tuple[str, ...]
    small_ram: str
    banned_tokens: tuple[int, ...]


EMBEDDED = Served((), "24MB", banned_tokens=())


@pytest.fixture(scope="module", params=["tiny", pytest.param("embedded", marks=pytest.mark.long)])
def served(request: pytest.FixtureRequest) -> Served:
    if request.param == "embedded":
        request.getfixturevalue("embedded_model")
        return EMBEDDED
    model = request.getfixturevalue("tiny_models")(TinyArchitecture.LLAMA)
    # The tiny model computes faster than it could load, and samples tokens without a text.
    return Served((str(model), "--no-cache-recompute"), "1200kB", banned_tokens=no_words())


@pytest.fixture(scope="module")
def table() -> Iterator[list[Account]]:
    accounts: list[Account] = []
    yield accounts
    print("\n" + "\n".join([TABLE_HEAD, *(account.row() for account in accounts)]))  # noqa: T201


@pytest.fixture(scope="module", params=[1, 4], ids=lambda n: f"parallel={n}")
def n_parallel(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def traffic(n_parallel: int, served: Served) -> Iterator[Traffic]:
    with serving(served, n_parallel) as (_, traffic):
        yield traffic


@contextmanager
def serving(
    served: Served,
    n_parallel: int,
    *arguments: str,
    floor: ReferenceFloor | None = None,
    start: Start = start_fast,
) -> Iterator[tuple[ServerProcess, Traffic]]:
    with (
        serve(*served.arguments, "--parallel", str(n_parallel), *arguments, start=start) as server,
        closing(
            Traffic(
                server.url,
                n_parallel=n_parallel,
                floor=floor,
                banned_tokens=served.banned_tokens,
            )
        ) as traffic,
    ):
        yield server, traffic


def assert_near_the_floor(account: Account, table: list[Account]) -> None:
    table.append(account)
    # Less would be reuse of what was never computed.
    assert account.n_floor <= account.n_prefilled <= MAX_AMPLIFICATION * account.n_floor


def test_an_agent_loop_computes_each_round_once(traffic: Traffic, table: list[Account]) -> None:
    history = [system("a tool user"), user(prose("find the bug", 40))]
    with traffic.counted("agent loop, 8 tool rounds") as account:
        for number in range(8):
            answer = traffic.chat(history, tools=[SEARCH_TOOL])
            result = listing(f"result {number}", 1 + number % 4)
            history += tool_round(answer.text, f"call_{number}", f"turn {number}", result)
        traffic.chat(history, tools=[SEARCH_TOOL])
    assert_near_the_floor(account, table)
    assert set(account.sources) == {"live"}


@pytest.mark.parametrize(("n_windows", "n_rounds"), [(3, 3), (8, 2)])
def test_alternating_windows_are_not_computed_again(
    traffic: Traffic, table: list[Account], n_windows: int, n_rounds: int
) -> None:
    shared = system(f"one of {n_windows}")
    windows = [[shared, user(f"Window {n}: {prose(f'window {n}', 60)}")] for n in range(n_windows)]
    with traffic.counted(f"{n_windows} alternating windows") as account:
        for number in range(n_rounds):
            for n, history in enumerate(windows):
                answer = traffic.chat(history)
                more = prose(f"window {n} round {number}", 30 + 20 * (n % 3))
                history += [assistant(answer.text), user(more)]
    assert_near_the_floor(account, table)
    assert set(account.sources) <= {"live", "memory"}


def test_sub_agents_that_start_at_once_share_one_prefill(
    traffic: Traffic, table: list[Account]
) -> None:
    shared = system("a sub-agent")
    histories = [[shared, user(f"Task {n}: {prose(f'task {n}', 50)}")] for n in range(8)]
    with traffic.counted("fan-out of 8 at once") as account:
        answers = traffic.chat_at_once(histories)
        for n, (history, answer) in enumerate(zip(histories, answers, strict=True)):
            history += [assistant(answer.text), user(f"{n}: {prose(f'follow {n}', 30)}")]
        traffic.chat_at_once(histories)
    assert_near_the_floor(account, table)
    assert set(account.sources) <= {"live", "memory"}


def test_a_volatile_last_message_costs_only_itself_and_the_text_after_it(
    traffic: Traffic, table: list[Account]
) -> None:
    history = [system("an agent with reminders")]
    with traffic.counted("volatile last message") as account:
        for number in range(6):
            history.append(user(prose(f"question {number}", 50)))
            reminder = user(f"Reminder: it is {10 + number} o'clock. {prose('todo', 30)}")
            answer = traffic.chat([*history, reminder])
            history.append(assistant(answer.text))
    assert_near_the_floor(account, table)


def test_a_discarded_fork_keeps_its_branch_point(traffic: Traffic, table: list[Account]) -> None:
    trunk = [system("a forker")]
    with traffic.counted("fork thrown away") as account:
        talk(traffic, trunk, "trunk", n_turns=3)
        for name in ("first fork", "second fork"):
            fork = list(trunk)
            talk(traffic, fork, name, n_turns=2)
        talk(traffic, trunk, "trunk again", n_turns=2)
    assert_near_the_floor(account, table)


def test_a_regenerated_reply_computes_at_most_one_token_of_its_prompt(
    traffic: Traffic, table: list[Account]
) -> None:
    history = [system("a regenerator")]
    with traffic.counted("regenerate, 4 times") as account:
        talk(traffic, history, "before", n_turns=2)
        history.append(user(prose("regenerated", 60)))
        traffic.chat(history, temperature=1, seed=0)
        for seed in range(1, 5):
            assert traffic.chat(history, temperature=1, seed=seed).n_prefilled <= 1
    assert_near_the_floor(account, table)


def test_an_edit_in_the_middle_keeps_both_versions(traffic: Traffic, table: list[Account]) -> None:
    history = [system("an editor")]
    with traffic.counted("edit in the middle, and undo") as account:
        talk(traffic, history, "original", n_turns=4)
        edited = list(history)
        edited[3] = user(prose("edited", 50))
        traffic.chat([*edited, user(prose("go on", 40))])
        traffic.chat([*history, user(prose("go on", 40))])
        traffic.chat([*edited, user(prose("go on differently", 40))])
    assert_near_the_floor(account, table)


def test_a_killed_server_resumes_from_disk(
    n_parallel: int, served: Served, table: list[Account], tmp_path: Path
) -> None:
    """Two conversations, kill -9 between two turns, and on."""
    histories = [[system("a survivor"), user(prose(f"survive {n}", 80))] for n in range(2)]
    directory = ("--cache-dir", str(tmp_path))
    with serving(served, n_parallel, *directory) as (server, traffic):
        with traffic.counted("before kill -9") as account:
            for n, history in enumerate(histories):
                talk(traffic, history, f"before {n}", n_turns=3)
        assert_near_the_floor(account, table)
        traffic.client.wait_until_on_disk()
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    # As a user starts it: nothing may depend on the seed of Python's hashes.
    again = serving(served, n_parallel, *directory, floor=traffic.floor, start=launch)
    with again as (_, traffic):
        with traffic.counted("after kill -9") as account:
            first = traffic.chat([*histories[0], user(prose("after 0", 40))])
            assert first.sources == {"disk"}
            for n, history in enumerate(histories):
                talk(traffic, history, f"after {n}", n_turns=2)
        assert_near_the_floor(account, table)
        assert account.sources["disk"] > first.n_cached


def test_conversations_beyond_the_memory_budget_are_restored_from_disk(
    n_parallel: int, served: Served, table: list[Account]
) -> None:
    with serving(served, n_parallel, "--cache-ram", served.small_ram) as (_, traffic):
        strangers = [traffic.client.tokenize(prose(f"stranger {n}", 450)) for n in range(7)]
        with traffic.counted("7 strangers beyond RAM") as account:
            for _ in range(2):
                for n, stranger in enumerate(strangers):
                    answer = traffic.complete(stranger)
                    more = traffic.client.tokenize(prose(f"more {n}", 40))
                    strangers[n] = [*stranger, *answer.sampled, *more]
        assert_near_the_floor(account, table)
        assert account.sources["disk"] > account.n_floor / 2
        assert traffic.client.metric("rekindle_cache_evictions_total", tier="memory") > 0
        assert traffic.client.metric("rekindle_cache_evictions_total", tier="disk") == 0


@pytest.mark.long
def test_without_a_disk_evicted_prefixes_are_recomputed_correctly(embedded_model: Path) -> None:
    """One slot: with several, where rows lie in the context may decide between near equals."""
    with serving(EMBEDDED, 1, "--cache-ram", EMBEDDED.small_ram, "--no-cache-disk") as (_, traffic):
        texts = [f"{prose(f'stranger {n}', 430)}\n{COUNTING}" for n in range(5)]
        strangers = [traffic.client.tokenize(text) for text in texts]
        with traffic.counted("5 strangers beyond RAM, no disk") as account:
            first = [traffic.complete(stranger).text for stranger in strangers]
            again = [traffic.complete(stranger).text for stranger in reversed(strangers)]
        assert again == first[::-1]
        assert account.n_floor < account.n_prefilled < account.n_prompt
        tier = {"tier": "memory"}
        assert traffic.client.metric("rekindle_cache_evictions_total", **tier) > 0
        assert traffic.client.metric("rekindle_cache_bytes", **tier) <= traffic.client.metric(
            "rekindle_cache_budget_bytes", **tier
        )


def talk(traffic: Traffic, history: list[Message], name: str, *, n_turns: int) -> None:
    """Adds turns to the history, with the replies that came."""
    for number in range(n_turns):
        history.append(user(prose(f"{name} {number}", 50)))
        history.append(assistant(traffic.chat(history).text))
