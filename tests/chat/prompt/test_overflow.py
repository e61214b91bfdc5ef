"""Which turns are dropped from a long conversation, and how long the rest stays the same."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rekindle.chat.conversation import Conversation, Message, Role, Text, ToolCall, ToolResult
from rekindle.chat.prompt.overflow import trim

N_CTX = 4096


def size_of(message: Message) -> int:
    return len(message.text) + sum(len(p.text) for p in message.parts if isinstance(p, ToolResult))


def say(role: Role, n_tokens: int) -> Message:
    return Message(role, (Text("x" * n_tokens),))


def call(number: int) -> Message:
    return Message(Role.ASSISTANT, (ToolCall(f"c{number}", "read", "{}"),))


def result(number: int, n_tokens: int) -> Message:
    return Message(Role.TOOL, (ToolResult(f"c{number}", None, "x" * n_tokens),))


def trimmed(*messages: Message) -> Conversation:
    return trim(Conversation(messages), n_ctx=N_CTX, n_head=100, size_of=size_of)


SYSTEM = say(Role.SYSTEM, 100)


def test_what_fits_is_left_alone() -> None:
    messages = (SYSTEM, say(Role.USER, 1000), say(Role.ASSISTANT, 1000), say(Role.USER, 1000))
    assert trimmed(*messages).messages == messages


def test_whole_turns_are_dropped_oldest_first_and_the_system_prompt_stays() -> None:
    turns = [m for _ in range(8) for m in (say(Role.USER, 300), say(Role.ASSISTANT, 300))]
    left = trimmed(SYSTEM, *turns, say(Role.USER, 50)).messages
    assert left[0] == SYSTEM
    assert left[1].role is Role.USER
    assert left[-1] == say(Role.USER, 50)
    assert sum(map(size_of, left)) <= N_CTX * 7 / 8


def test_over_60_turns_the_beginning_changes_at_most_once_in_10() -> None:
    history: list[Message] = [SYSTEM]
    beginnings = []
    for number in range(60):
        history.append(Message(Role.USER, (Text(f"{number:03}" + "x" * 57),)))
        left = trimmed(*history)
        beginnings.append(left.messages[1].text[:3])
        history.append(say(Role.ASSISTANT, 60))
    n_changes = sum(a != b for a, b in pairwise(beginnings))
    assert 1 <= n_changes <= 6


def test_a_long_tool_loop_drops_its_oldest_rounds_and_no_result_loses_its_call() -> None:
    loop = [m for number in range(12) for m in (call(number), result(number, 600))]
    left = trimmed(SYSTEM, say(Role.USER, 100), *loop).messages
    assert left[:2] == (SYSTEM, say(Role.USER, 100))
    ids = [part.id for m in left for part in m.calls]
    answered = [p.call_id for m in left for p in m.parts if isinstance(p, ToolResult)]
    assert ids == answered
    assert ids[-1] == "c11"
    assert 1 <= len(ids) < 12


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 900)), max_size=40))
def test_the_cut_moves_forward_only_and_keeps_the_end(turns: list[tuple[bool, int]]) -> None:
    history: list[Message] = [SYSTEM]
    cut = 0
    for has_call, n_tokens in turns:
        history.append(say(Role.USER, n_tokens))
        if has_call:
            history += [call(len(history)), result(len(history), n_tokens)]
        history.append(say(Role.ASSISTANT, n_tokens // 2))
        left = trimmed(*history)
        n_dropped = len(history) - len(left.messages)
        assert n_dropped >= cut
        cut = n_dropped
        assert left.messages[-1] is history[-1]
        assert left.messages[0] is SYSTEM
