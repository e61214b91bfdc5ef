"""Faults that are planted in a conversation are found where they are; a clean one has none."""

import json
import uuid
from collections.abc import Callable, Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.chat.prompt.prompt import PromptBuilder
from rekindle.lint.audit import TraceAudit, audit
from rekindle.lint.faults import FaultKind
from rekindle.models.prompt_reader import prompt_reader
from rekindle.replay.traffic import ReplayRequest
from tests.lint.conversations import TOOL_NAMES, Agent, Body, agent, prose

Requests = list[Body]


@pytest.fixture(scope="module")
def builder() -> Iterator[PromptBuilder]:
    with prompt_reader(None, chat_template=None) as found:
        yield found


def audit_of(builder: PromptBuilder, bodies: Requests, speed: float | None = None) -> TraceAudit:
    """Audit chat requests that have no recorded name of a conversation."""
    requests = [
        ReplayRequest(f"r:{n}", "/v1/chat/completions", body, (), conversation=f"{n}", source=0)
        for n, body in enumerate(bodies)
    ]
    return audit("trace", requests, builder, speed=speed)


def insert(random: Random, text: str, inserted: str) -> str:
    """Insert in the first half: enough text must follow."""
    words = text.split(" ")
    place = random.randrange(1, len(words) // 2)
    return " ".join([*words[:place], inserted, *words[place:]])


def value_of(kind: FaultKind, number: int) -> str:
    match kind:
        case FaultKind.CLOCK:
            return f"Current time: 2026-11-{number + 10}T09:{number + 10}:12Z"
        case FaultKind.COUNTER:
            return f"This is step {number + 1} of many"
        case _:
            return f"Session id {uuid.UUID(int=(number + 3) << 96 | number)}"


def plant_volatile(kind: FaultKind) -> "Plant":
    """A value that changes with each request: in the system prompt, a tool or a message."""

    def plant(random: Random, clean: Agent, requests: Requests) -> str:
        place = random.choice(["system", "tool", "message"])
        seed = random.random()
        index = random.randrange(len(TOOL_NAMES))
        message = random.randrange(1, clean.ends[len(requests) // 2])
        for number, request in enumerate(requests):
            value = value_of(kind, number)
            if place == "tool":
                function = request["tools"][index]["function"]
                function["description"] = insert(Random(seed), function["description"], value)
            elif place == "system":
                first = request["messages"][0]
                first["content"] = insert(Random(seed), first["content"], value)
            elif message < len(request["messages"]):
                changed = request["messages"][message]
                changed["content"] = insert(Random(seed), changed["content"], value)
        names = {"system": "system prompt", "tool": f"tool {TOOL_NAMES[index]}"}
        is_result = clean.messages[message]["role"] == "tool"
        return names.get(place, f"message {message}{', tool result' if is_result else ''}")

    return plant


def changed_from(random: Random, requests: Requests) -> Requests:
    """The requests from one in the second half on."""
    return requests[random.randrange(len(requests) // 2, len(requests)) :]


def plant_tool_order(random: Random, _: Agent, requests: Requests) -> str:
    one, other = random.sample(range(len(TOOL_NAMES)), 2)
    for request in changed_from(random, requests):
        tools = request["tools"]
        tools[one], tools[other] = tools[other], tools[one]
    return "tools"


def plant_key_order(random: Random, _: Agent, requests: Requests) -> str:
    """The arguments of one call come back with their keys in another order."""
    later = changed_from(random, requests)
    earliest = requests[requests.index(later[0]) - 1]["messages"]
    place = random.choice([n for n, m in enumerate(earliest) if "tool_calls" in m])
    for request in later:
        function = request["messages"][place]["tool_calls"][0]["function"]
        arguments = json.loads(function["arguments"])
        function["arguments"] = json.dumps(dict(reversed(arguments.items())))
    return f"message {place}, tool call"


def plant_dropped_tools(random: Random, _: Agent, requests: Requests) -> str:
    n_dropped = random.randrange(1, len(TOOL_NAMES) + 1)
    for request in changed_from(random, requests):
        request["tools"] = request["tools"][n_dropped:]
    return "tools"


def plant_rewritten(random: Random, _: Agent, requests: Requests) -> str:
    """One message is shortened, rewritten or dropped in all later requests."""
    later = changed_from(random, requests)
    n_before = len(requests[requests.index(later[0]) - 1]["messages"])
    place = random.randrange(1, n_before - 1)
    role = later[0]["messages"][place]["role"]
    way = random.choice(["text", "dropped"] if role == "user" else ["text"])
    text = prose(random, 9)
    for request in later:
        if way == "dropped":
            del request["messages"][place]
        else:
            request["messages"][place]["content"] = text
    is_result = role == "tool"
    return f"message {place}{', tool result' if is_result else ''}"


Plant = Callable[[Random, Agent, Requests], str]
PLANTS: dict[str, tuple[FaultKind, Plant]] = {
    "clock": (FaultKind.CLOCK, plant_volatile(FaultKind.CLOCK)),
    "counter": (FaultKind.COUNTER, plant_volatile(FaultKind.COUNTER)),
    "id": (FaultKind.ID, plant_volatile(FaultKind.ID)),
    "tool order": (FaultKind.ORDER, plant_tool_order),
    "key order": (FaultKind.ORDER, plant_key_order),
    "dropped tools": (FaultKind.TOOLS, plant_dropped_tools),
    "rewritten history": (FaultKind.HISTORY, plant_rewritten),
}


@pytest.mark.parametrize("name", PLANTS)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), n_rounds=st.integers(2, 4))
def test_a_planted_fault_is_named_with_its_kind_and_place(
    builder: PromptBuilder, name: str, seed: int, n_rounds: int
) -> None:
    random = Random(seed)
    clean = agent(random, n_rounds)
    requests = clean.requests()
    kind, plant = PLANTS[name]
    where = plant(random, clean, requests)
    found = audit_of(builder, requests)
    assert {(fault.change.kind, fault.change.where) for fault in found.faults} == {(kind, where)}
    assert found.amplification > 1


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), n_rounds=st.integers(1, 4))
def test_a_conversation_that_only_grows_has_no_fault(
    builder: PromptBuilder, seed: int, n_rounds: int
) -> None:
    random = Random(seed)
    found = audit_of(builder, agent(random, n_rounds).requests())
    assert found.faults == ()
    assert found.amplification == 1
    assert found.n_new == found.n_prefilled
