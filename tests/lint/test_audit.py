"""Faults that are planted in a conversation are found where they are; a clean one has none."""

import json
import uuid
from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.chat.prompt.prompt import PromptBuilder
from rekindle.lint.advice import culprit_of
from rekindle.lint.audit import TraceAudit, audit
from rekindle.lint.faults import FaultKind
from rekindle.lint.resent import n_resent
from rekindle.models.prompt_reader import prompt_reader
from rekindle.replay.floor import units_of_tokens
from rekindle.replay.traffic import ReplayRequest
from tests.lint.conversations import TOOL_NAMES, Agent, Body, agent, prose

Requests = list[Body]
CHAT_PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def builder() -> Iterator[PromptBuilder]:
    with prompt_reader(None, chat_template=None) as found:
        yield found


def audit_of(builder: PromptBuilder, bodies: Requests, speed: float | None = None) -> TraceAudit:
    """Audit chat requests that have no recorded name of a conversation."""
    requests = [
        ReplayRequest(f"r:{n}", CHAT_PATH, body, (), conversation=f"{n}", source=0)
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


def test_clean_traffic_of_several_conversations_has_no_fault(builder: PromptBuilder) -> None:
    """Two conversations in turn, a title, a branch that is dropped, a compaction."""
    random = Random(1)
    one = agent(random, 3)
    other = Agent(one.tools, [one.messages[0], *agent(random, 3).messages[1:]], one.ends)
    title = {"messages": [one.messages[1], {"role": "user", "content": "Write a title."}]}
    branch = deepcopy(one.requests()[3])
    branch["messages"].append({"role": "user", "content": prose(random, 50)})
    summary = {"role": "user", "content": prose(random, 60)}
    compacted = {**one.requests()[-1], "messages": [one.messages[0], summary]}
    bodies = [each for pair in zip(one.requests(), other.requests(), strict=True) for each in pair]
    found = audit_of(builder, [bodies[0], title, *bodies[1:8], branch, *bodies[8:], compacted])
    assert found.faults == ()
    assert found.amplification == 1


def sessions_that_read_the_same_file(random: Random, n_sessions: int) -> list[Requests]:
    """The same system prompt, tools and first result; other tasks and replies."""
    clean = agent(random, 2)
    same_file = clean.messages[3]
    sessions = []
    for _ in range(n_sessions):
        messages = [clean.messages[0], *agent(random, 2).messages[1:]]
        messages[3] = {**same_file, "content": same_file["content"] * 4}
        sessions.append(Agent(clean.tools, messages, clean.ends).requests())
    return sessions


@pytest.mark.parametrize("is_in_turn", [False, True])
def test_sessions_without_names_that_read_the_same_file_have_no_fault(
    builder: PromptBuilder, *, is_in_turn: bool
) -> None:
    sessions = sessions_that_read_the_same_file(Random(11), 5)
    ordered = zip(*sessions, strict=True) if is_in_turn else sessions
    found = audit_of(builder, [request for each in ordered for request in each])
    assert found.faults == ()
    assert found.amplification == 1


def test_a_fault_in_one_of_several_sessions_is_found(builder: PromptBuilder) -> None:
    """The file is summarised in the last request of the last session."""
    sessions = sessions_that_read_the_same_file(Random(11), 5)
    sessions[-1][-1]["messages"][2]["content"] = "The file is long."
    [fault] = audit_of(builder, [request for each in sessions for request in each]).faults
    assert (fault.change.kind, fault.change.where) == (FaultKind.HISTORY, "message 2")
    assert [loss.request.name for loss in fault.losses] == ["r:19"]


def test_text_of_a_session_in_front_of_shared_text_is_named(builder: PromptBuilder) -> None:
    requests = [agent(Random(7), 1).requests()[0] for _ in range(2)]
    for request, folder in zip(requests, ("/home/alice/lanterns", "/srv/bridge"), strict=True):
        system = request["messages"][0]
        system["content"] = f"You work in {folder}.\n{system['content']}"
    [fault] = audit_of(builder, requests).faults
    assert (fault.change.kind, fault.change.where) == (FaultKind.SESSION, "system prompt")
    assert fault.change.expected.startswith("home/alice")


TOOLS_FIRST = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    ("template", "kind", "where"),
    [
        (None, FaultKind.CLOCK, "system prompt"),  # the embedded one renders the tools behind it
        (TOOLS_FIRST, FaultKind.TOOLS, "tools"),
    ],
)
def test_of_two_changes_the_one_that_is_rendered_first_is_named(
    template: str | None, kind: FaultKind, where: str
) -> None:
    """A clock in the system prompt, and one more tool with each request."""
    requests = agent(Random(6), 2).requests()
    for number, request in enumerate(requests):
        system = request["messages"][0]
        system["content"] = f"\nIt is {value_of(FaultKind.CLOCK, number)}.\n{system['content']}\n"
        request["tools"] = request["tools"][: number + 1]
    with prompt_reader(None, chat_template=template) as builder:
        [fault] = audit_of(builder, requests).faults
    assert (fault.change.kind, fault.change.where) == (kind, where)


def test_amplification_counts_every_token_once(builder: PromptBuilder) -> None:
    """A tool that was dropped: all messages are prefilled again, and nothing else is."""
    clean = agent(Random(3), 2).requests()
    dropped = deepcopy(clean)
    dropped[-1]["tools"] = []
    without = audit_of(builder, [dropped[-1]])
    found = audit_of(builder, dropped, speed=100.0)
    grown = audit_of(builder, clean)
    assert found.n_prompt == audit_of(builder, clean[:-1]).n_prompt + without.n_prompt
    assert found.n_prefilled > grown.n_prefilled
    # New are the tokens of the clean trace, and a few where the texts meet.
    assert abs(found.n_new - grown.n_prefilled) < 64
    assert found.amplification == found.n_prefilled / found.n_new
    assert found.seconds_lost == found.n_lost / 100
    assert found.faults[0].seconds == found.seconds_lost


def test_seconds_come_from_the_times_of_the_trace(builder: PromptBuilder) -> None:
    bodies = agent(Random(3), 2).requests()
    bodies[-1]["tools"] = []
    requests = [
        ReplayRequest(
            f"r:{n}", CHAT_PATH, body, (), "c", 0, started=n, ended=n + 0.9, first_byte=n + 0.5
        )
        for n, body in enumerate(bodies)
    ]
    found = audit("trace", requests, builder)
    assert found.speed == pytest.approx(found.n_prefilled / (0.5 * len(bodies)))
    assert found.faults[0].seconds == pytest.approx(found.n_lost / (found.speed or 0))


def history(number: int, text: str, first: str) -> list[tuple[str, str]]:
    """A question with its answer, and one more question with each number."""
    said = [("user", first), ("assistant", f"One {text}"), ("user", f"Two {text}")]
    return [*said, *(("user", f"More {n} {text}") for n in range(number))]


def in_format(path: str, system: str, turns: list[tuple[str, str]]) -> Body:
    messages = [{"role": role, "content": text} for role, text in turns]
    match path:
        case "/v1/messages":
            return {"system": system, "messages": messages, "max_tokens": 9}
        case "/v1/responses":
            return {"instructions": system, "input": messages}
        case "/v1beta/models/m:generateContent":
            contents = [
                {"role": "model" if role == "assistant" else role, "parts": [{"text": text}]}
                for role, text in turns
            ]
            return {"systemInstruction": {"parts": [{"text": system}]}, "contents": contents}
        case "/v1/completions":
            return {"prompt": "\n".join([system, *(text for _, text in turns)])}
        case "/api/generate":
            return {"system": system, "prompt": "\n".join(text for _, text in turns)}
        case _:
            return {"messages": [{"role": "system", "content": system}, *messages]}


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"),
        *("/v1beta/models/m:generateContent", "/api/chat", "/api/generate"),
    ],
)
def test_a_clock_is_found_in_every_wire_format(builder: PromptBuilder, path: str) -> None:
    text = prose(Random(5), 120)
    requests = [
        ReplayRequest(
            f"r:{n}",
            path,
            in_format(path, f"Now it is 12:0{n}:07. {text}", history(n, text, text)),
            (),
            f"{n}",
            0,
        )
        for n in range(3)
    ]
    [fault] = audit("trace", requests, builder).faults
    where = "prompt" if path == "/v1/completions" else "system prompt"
    assert (fault.change.kind, fault.change.where) == (FaultKind.CLOCK, where)
    assert [loss.request.name for loss in fault.losses] == ["r:1", "r:2"]


def test_requests_that_need_a_stored_response_are_counted(builder: PromptBuilder) -> None:
    body = {"input": "Hello", "previous_response_id": "resp_1"}
    requests = [
        ReplayRequest("r:1", "/v1/responses", body, (), "c", 0),
        ReplayRequest("r:2", CHAT_PATH, {"messages": 7}, (), "c", 0),
        ReplayRequest("r:3", CHAT_PATH, agent(Random(1), 1).requests()[0], (), "c", 0),
    ]
    found = audit("trace", requests, builder)
    assert (found.n_requests, found.n_unread) == (3, 2)


@given(
    st.lists(st.integers(0, 3), max_size=80),
    st.lists(st.integers(0, 3), max_size=80),
)
def test_no_token_is_counted_twice_as_sent_again(one: list[int], other: list[int]) -> None:
    n_found = n_resent(units_of_tokens(one), units_of_tokens(other))
    assert 0 <= n_found <= min(len(one), len(other))
    assert n_resent(units_of_tokens(one), units_of_tokens(one)) in (0, len(one))
    assert n_resent(units_of_tokens(one * 3), units_of_tokens(one)) in (0, len(one))


def test_runs_are_found_in_any_order() -> None:
    one, other = list(range(100)), list(range(200, 260))
    assert n_resent(units_of_tokens(one + other), units_of_tokens([7] * 5 + other + one)) == 160
    assert n_resent(units_of_tokens(one[:15]), units_of_tokens(one)) == 0


def test_arguments_of_the_template_are_named_only_where_they_change_the_prompt() -> None:
    template = "{{ effort }}{% for m in messages %}\n{{ m.role }} {{ m.content }}{% endfor %}\n>"
    bodies = [{"messages": each["messages"]} for each in agent(Random(2), 2).requests()]
    other = deepcopy(bodies)
    for number, body in enumerate(bodies):
        body["chat_template_kwargs"] = {"effort": "low" if number < 3 else "high"}
        other[number]["chat_template_kwargs"] = {"unknown": number}
    with prompt_reader(None, chat_template=template) as builder:
        [fault] = audit_of(builder, bodies).faults
        assert audit_of(builder, other).faults == ()
    assert (fault.change.kind, fault.change.where) == (FaultKind.SYSTEM, "template arguments")


def test_a_turn_that_the_template_renders_differently_is_no_fault_of_the_client() -> None:
    """The template counts the messages at its head."""
    template = (
        "{{ messages | length }} messages"
        "{% for m in messages %}\n{{ m.role }} {{ m.content }}{% endfor %}\n>"
    )
    bodies = [{"messages": each["messages"]} for each in agent(Random(2), 2).requests()]
    with prompt_reader(None, chat_template=template) as builder:
        [fault] = audit_of(builder, bodies).faults
    assert (fault.change.kind, fault.change.where) == (FaultKind.TEMPLATE, "prompt")
    assert culprit_of(fault.change.kind) == "template"
