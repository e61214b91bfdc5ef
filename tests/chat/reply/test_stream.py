"""What is remembered of a reply is what it said, however it ended."""

import asyncio
from collections.abc import Sequence

import pytest

from rekindle.chat.conversation import Conversation, Message, Role, Text
from rekindle.chat.dialects import choose
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.assembler import ReplyReader
from rekindle.chat.reply.events import ReplyCall
from rekindle.chat.reply.parser import ParsedReply
from rekindle.chat.reply.stream import ReplyStream
from tests.chat.test_responder import ByteTokenizer, script
from tests.support.chat import reply_stream

ASKED = Conversation((Message(Role.USER, (Text("?"),)),))
TWO_CALLS = '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]'
SCHEMAS = {"a": {"type": "object"}, "b": {"type": "object"}}


class Memory:
    def __init__(self) -> None:
        self.turns: list[tuple[str, ParsedReply]] = []

    def __call__(
        self, tokens: Sequence[int], _end: str, said: ParsedReply, _ids: Sequence[str]
    ) -> None:
        self.turns.append((bytes(tokens).decode(), said))


def stream(text: str, memory: Memory, *, template: str, in_reasoning: bool = False) -> ReplyStream:
    prompt = Prompt((1,), (), "", conversation=ASKED, remember=memory)
    tokenizer = ByteTokenizer()
    dialect = choose(template, supports_tools=True)
    reader = ReplyReader(dialect, SCHEMAS, in_reasoning, tokenizer.piece)
    return reply_stream(prompt, script(text), tokenizer, reader=reader)


def test_a_client_that_leaves_between_two_calls_leaves_both_of_them_remembered() -> None:
    memory = Memory()
    reply = stream(TWO_CALLS, memory, template="[TOOL_CALLS]")

    async def read_one_call() -> None:
        async for event in reply:
            if isinstance(event, ReplyCall):
                break
        reply.close()

    asyncio.run(read_one_call())
    [(text, said)] = memory.turns
    assert text == TWO_CALLS
    assert [call.name for call in said.calls] == ["a", "b"]


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
        dialect = choose(template, supports_tools=True)
        reader = ReplyReader(
            dialect, SCHEMAS, begins_in_reasoning=False, bytes_of=ByteTokenizer().piece
        )
        assert reader.read(text).text == text
