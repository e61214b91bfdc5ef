"""What is remembered of a reply is what it said, however it ended."""

import asyncio
from collections.abc import Sequence

import pytest

from rekindle.chat.conversation import Conversation, Message, Role, Text
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.assembler import ReplyReader
from rekindle.chat.reply.events import ReplyCall, ReplyDone, ReplyStats
from rekindle.chat.reply.parser import ParsedReply
from rekindle.chat.reply.stream import ReplyStream
from rekindle.generation.forgetting import Owner
from tests.chat.test_responder import ByteTokenizer, script
from tests.support.chat import reply_stream
from tests.support.dialects import dialect_of

ASKED = Conversation((Message(Role.USER, (Text("?"),)),))
CALL = '{"name": "a", "arguments": {}}'
FIRST = f"<tool_call>\n{CALL}\n</tool_call>"
SCHEMAS = {"a": {"type": "object"}, "b": {"type": "object"}}


class Memory:
    def __init__(self) -> None:
        self.turns: list[tuple[str, ParsedReply]] = []

    def __call__(
        self,
        tokens: Sequence[int],
        _end: str,
        said: ParsedReply,
        _ids: Sequence[str],
        _owner: Owner,
    ) -> None:
        self.turns.append((bytes(tokens).decode(), said))


def stream(text: str, memory: Memory, *, template: str, in_reasoning: bool = False) -> ReplyStream:
    prompt = Prompt((1,), (), "", conversation=ASKED, remember=memory)
    tokenizer = ByteTokenizer()
    dialect = dialect_of(template)
    reader = ReplyReader(dialect, SCHEMAS, in_reasoning, tokenizer.piece)
    return reply_stream(prompt, script(text), tokenizer, reader=reader)


@pytest.mark.parametrize(
    ("template", "first", "second", "n_remembered"),
    [
        ("<tool_call>", FIRST, FIRST, 1),
        # A template would close the list.
        ("[TOOL_CALLS]", f"[TOOL_CALLS][{CALL}", f", {CALL}]", 0),
    ],
)
def test_a_client_that_leaves_behind_a_call_leaves_it_remembered_if_it_is_closed(
    template: str, first: str, second: str, n_remembered: int
) -> None:
    memory = Memory()
    reply = stream(first + second, memory, template=template)

    async def read_one_call() -> None:
        async for event in reply:
            if isinstance(event, ReplyCall):
                break
        reply.close()

    asyncio.run(read_one_call())
    assert len(memory.turns) == n_remembered
    for text, said in memory.turns:
        assert text == first
        assert [call.name for call in said.calls] == ["a"]


@pytest.mark.parametrize("in_reasoning", [True, False])
def test_a_reply_that_ends_inside_its_reasoning_is_not_remembered(
    in_reasoning: bool,  # noqa: FBT001
) -> None:
    """A template would close it, and the sampled tokens do not."""
    memory = Memory()
    text = "I wonder" if in_reasoning else "<think>I wonder"
    reply = stream(text, memory, template="<tool_call>", in_reasoning=in_reasoning)

    async def read() -> None:
        async for _ in reply:
            pass

    asyncio.run(read())
    assert memory.turns == []


def test_marks_that_an_answer_talks_of_are_part_of_it() -> None:
    for template, text in (
        ("<tool_call><function=", "Close with `</tool_call>`."),
        ("<response></response>", "<a><response>1</response></a>"),
    ):
        dialect = dialect_of(template)
        reader = ReplyReader(
            dialect, SCHEMAS, begins_in_reasoning=False, bytes_of=ByteTokenizer().piece
        )
        assert reader.read(text).text == text


@pytest.mark.parametrize(
    ("text", "in_reasoning", "n_reasoning"),
    [
        ("ab</think>\n\ncd", True, len("ab</think>")),
        ("<think>ab</think>cd", False, len("<think>ab</think>")),
        ("ab", True, 2),
        ("ab", False, 0),
    ],
)
def test_tokens_of_the_reasoning_are_counted_with_its_mark(
    text: str,
    in_reasoning: bool,  # noqa: FBT001
    n_reasoning: int,
) -> None:
    reply = stream(text, Memory(), template="<tool_call>", in_reasoning=in_reasoning)

    async def stats() -> ReplyStats:
        [done] = [event async for event in reply if isinstance(event, ReplyDone)]
        return done.stats

    found = asyncio.run(stats())
    assert (found.n_reasoning, found.n_generated) == (n_reasoning, len(text))
