"""Chats with tools and reasoning over templates that end, open or move turns in odd ways."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rekindle.chat.conversation import Conversation, Message, Reasoning, Role, Text, Tool
from rekindle.config.choices import ReasoningHistory
from rekindle.llama.model import GgufModel
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from tests.campaigns.templates import user
from tests.campaigns.turns import Chat, Way
from tests.support.turn_bench import TurnBench, extended, message_of
from tests.support.turn_templates import SOURCES, Kind

_TOOLS = "{%- if tools %}{{- '<|system|>' + tools | tojson }}{%- endif %}"
_CALLS = """\
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>' + {'name': c.function.name, 'arguments': c.function.arguments} | tojson
    + '</tool_call>' }}{%- endfor %}
"""

# As gpt-oss: the turn ends in another token than the model writes, behind headers of its own.
CHANNELS = """\
{%- if tools %}{{- '<|start|>system<|message|>' + tools | tojson + '<|end|>' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.thinking and m.tool_calls %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{%- for c in m.tool_calls or [] %}
{{- '<|start|>assistant to=functions.' + c.function.name + '<|channel|>commentary json<|message|>'
    + c.function.arguments | tojson + '<|call|>' }}{%- endfor %}
{%- if m.content and not m.tool_calls %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{%- endif %}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

# As GLM: nothing ends a turn but the header of the next one.
HEADERS = (
    _TOOLS
    + """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|assistant|>\\n' }}
{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>\\n' }}{%- endif %}
{{- m.content }}"""
    + _CALLS
    + """\
{%- elif m.role == 'tool' %}{{- '<|observation|>\\n' + m.content }}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
{#- <|user|> <|system|> #}
"""
)

# As Gemma 4: the model continues behind a tool's result without a header.
GOING_ON = (
    _TOOLS
    + """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|turn>model\\n' }}
{%- endif %}
{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}
{{- m.content }}"""
    + _CALLS
    + """\
{{- '<turn|>\\n' if not m.tool_calls }}
{%- elif m.role == 'tool' %}{{- '<|tool_response>' + m.content + '<tool_response|>' }}
{%- else %}{{- '<|turn>' + m.role + '\\n' + m.content + '<turn|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<|turn>model\\n' }}{%- endif %}
{#- <|system|> #}
"""
)

# As Mistral: the tools stand before the last user message, so a new one moves them.
MOVED_TOOLS = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- m.content }}
{%- if m.tool_calls %}{{- '[TOOL_CALLS][' }}{%- for c in m.tool_calls %}
{{- {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}{%- endfor %}
{{- ']' }}{%- endif %}
{{- '</s>' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}
{%- if loop.index0 == ns.last and tools %}
{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' + m.content + '[/INST]' }}{%- endif %}
{%- endfor %}
"""


@pytest.fixture(scope="module")
def vocabulary(embedded_model: object) -> Iterator[Vocabulary]:
    model = GgufModel(embedded_model, gpu_layers=0)  # type: ignore[arg-type]
    yield model.vocabulary
    model.close()


@pytest.mark.parametrize(
    ("source", "way", "history", "letters"),
    [
        (CHANNELS, Way.NONE, ReasoningHistory.AUTO, "======"),
        (CHANNELS, Way.DROPPED, ReasoningHistory.AUTO, "==rr=r"),
        (CHANNELS, Way.DROPPED, ReasoningHistory.KEEP, "======"),
        (HEADERS, Way.NONE, ReasoningHistory.AUTO, "======"),
        (HEADERS, Way.DROPPED, ReasoningHistory.AUTO, "==dd=d"),
        (HEADERS, Way.DROPPED, ReasoningHistory.KEEP, "======"),
        (HEADERS, Way.SENT, ReasoningHistory.AUTO, "======"),
        (GOING_ON, Way.NONE, ReasoningHistory.AUTO, "======"),
        (GOING_ON, Way.SENT, ReasoningHistory.AUTO, "======"),
        (MOVED_TOOLS, Way.NONE, ReasoningHistory.AUTO, "==rr=r"),
        (MOVED_TOOLS, Way.NONE, ReasoningHistory.KEEP, "==rr=r"),
    ],
)
def test_every_turn_that_the_template_does_not_rewrite_keeps_its_tokens(
    vocabulary: Vocabulary, source: str, way: Way, history: ReasoningHistory, letters: str
) -> None:
    notes: list[str] = []
    assert Chat(source, vocabulary, history, notes).play(way).letters == letters, "\n".join(notes)


def tool(name: str) -> Tool:
    return Tool(name, json.dumps({"type": "function", "function": {"name": name}}))


ASKED = Conversation((user("Hello."),), (tool("read"),))


def test_a_switch_shows_the_earlier_reasoning_that_the_client_sends(
    vocabulary: Vocabulary,
) -> None:
    bench = TurnBench(SOURCES[Kind.SWITCHED], vocabulary)
    switched_off = replace(ASKED, template_kwargs={"preserve_thinking": False})
    for asked, sends, is_kept in (
        (ASKED, True, True),
        (ASKED, False, False),
        (switched_off, True, False),
    ):
        exchange = bench.reply(asked, "<think>\nHm.\n</think>\n\nHi.")
        message = message_of(exchange.said, (), with_reasoning=sends)
        conversation = extended(asked, message, user("And?"))
        tokens = bench.prompts.from_conversation(conversation).tokens
        assert (tokens[: len(exchange.all_tokens)] == exchange.all_tokens) is is_kept
        assert (tokens == bench.plain(conversation)) is not is_kept


def test_equal_answers_with_different_reasoning_are_told_apart_by_their_prompt(
    vocabulary: Vocabulary,
) -> None:
    bench = TurnBench(SOURCES[Kind.TRIMMED], vocabulary, history=ReasoningHistory.KEEP)
    exchanges = []
    for number in range(6):
        asked = replace(ASKED, tools=(tool(f"read_{number}"),))
        exchange = bench.reply(asked, f"<think>\nThought {number}.\n</think>\n\nHi.")
        exchanges.append((asked, exchange))
    for asked, exchange in exchanges:
        conversation = extended(asked, exchange.message, user("And?"))
        tokens = bench.prompts.from_conversation(conversation).tokens
        assert tokens[: len(exchange.all_tokens)] == exchange.all_tokens


def test_a_message_that_was_left_open_and_its_reply_keep_their_tokens(
    vocabulary: Vocabulary,
) -> None:
    bench = TurnBench(SOURCES[Kind.THINKING], vocabulary)
    opened = extended(ASKED, Message(Role.ASSISTANT, (Text("The colour is"),)))
    exchange = bench.reply(replace(opened, continue_last=True), " a deep red.")
    for text, is_kept in (("The colour is a deep red.", True), ("A colour is a deep red.", False)):
        answered = extended(ASKED, Message(Role.ASSISTANT, (Text(text),)), user("And?"))
        tokens = bench.prompts.from_conversation(answered).tokens
        assert (tokens[: len(exchange.all_tokens)] == exchange.all_tokens) is is_kept
        assert is_kept or tokens == bench.plain(answered)


def test_a_reply_that_was_cut_and_is_continued_keeps_the_tokens_of_both_parts(
    vocabulary: Vocabulary,
) -> None:
    bench = TurnBench(SOURCES[Kind.THINKING], vocabulary)
    exchange = bench.reply(ASKED, "The colour is")
    for text, rest in (("The colour is", " a deep"), ("The colour is a deep", " red.")):
        opened = extended(ASKED, Message(Role.ASSISTANT, (Text(text),)))
        continued = bench.reply(replace(opened, continue_last=True), rest)
        assert continued.prompt.tokens == exchange.all_tokens
        exchange = continued
    answered = extended(ASKED, Message(Role.ASSISTANT, (Text("The colour is a deep red."),)))
    tokens = bench.prompts.from_conversation(extended(answered, user("And?"))).tokens
    assert tokens[: len(exchange.all_tokens)] == exchange.all_tokens


@pytest.mark.parametrize("sent", ["The sky ", "The sky", "A sky  ", "The sky  \n"])
def test_a_cut_reply_whose_end_came_back_otherwise_is_tokenised_as_it_came(
    vocabulary: Vocabulary, sent: str
) -> None:
    bench = TurnBench(SOURCES[Kind.THINKING], vocabulary)
    bench.reply(ASKED, "The sky  ")
    opened = extended(ASKED, Message(Role.ASSISTANT, (Text(sent),)))
    conversation = replace(opened, continue_last=True)
    assert bench.prompts.from_conversation(conversation).tokens == bench.plain(conversation)


def test_a_reply_that_was_cut_within_a_character_is_tokenised_as_it_came(
    vocabulary: Vocabulary,
) -> None:
    bench = TurnBench(SOURCES[Kind.THINKING], vocabulary)
    *half, _ = vocabulary.tokenize("\U0001f525", parse_special=False)
    assert half
    bench.reply(ASKED, "Fire ", [*vocabulary.tokenize("Fire ", parse_special=False), *half])
    opened = extended(ASKED, Message(Role.ASSISTANT, (Text("Fire "),)))
    conversation = replace(opened, continue_last=True)
    assert bench.prompts.from_conversation(conversation).tokens == bench.plain(conversation)


def test_a_copy_of_a_reply_does_not_stand_in_for_the_edited_one(vocabulary: Vocabulary) -> None:
    bench = TurnBench(SOURCES[Kind.THINKING], vocabulary, history=ReasoningHistory.KEEP)
    call = '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'
    exchange = bench.reply(ASKED, f"<think>\nHm.\n</think>\n\n{call}")
    copied = exchange.message
    edited = replace(copied, parts=(Reasoning("Well."), *copied.parts))
    conversation = extended(ASKED, edited, user("Again."), copied, user("And?"))
    assert bench.prompts.from_conversation(conversation).tokens == bench.plain(conversation)


@pytest.mark.parametrize("sends", [True, False], ids=["sends reasoning", "drops reasoning"])
def test_the_next_prompt_is_foreseen_as_this_client_will_send_it(
    vocabulary: Vocabulary, *, sends: bool
) -> None:
    bench = TurnBench(SOURCES[Kind.TRIMMED], vocabulary)
    conversation = ASKED
    for number in range(2):
        exchange = bench.reply(conversation, f"<think>\nThought {number}.\n</think>\n\nHi.")
        ahead = bench.prompts.after_reply(exchange.prompt, exchange.said)
        message = message_of(exchange.said, (), with_reasoning=sends)
        conversation = extended(conversation, message, user("And?"))
    tokens = bench.prompts.from_conversation(conversation).tokens
    assert tokens[: len(ahead)] == ahead
    assert len(tokens) - len(ahead) < 20
    assert (ahead[: len(exchange.all_tokens)] == exchange.all_tokens) is sends
