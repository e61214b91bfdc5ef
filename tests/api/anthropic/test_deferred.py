"""Tools that are loaded in mid-conversation leave the prompt before them as it was."""

from typing import Any

import pytest

from rekindle.api.anthropic.messages import conversation_of
from rekindle.api.anthropic.schema import MessagesRequest
from rekindle.api.requests.media import MediaReader
from rekindle.chat.dialects.choice import chosen
from rekindle.chat.prompt.canonical_tools import schemas_of
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.events import ReplyOptions, ToolChoice, ToolMode
from rekindle.chat.reply.tool_use import ToolUses
from rekindle.chat.template.guard import Guard
from rekindle.chat.template.template import CHATML, ChatTemplate
from rekindle.config.choices import MediaPolicy
from rekindle.generation.request import Sampling
from tests.api.anthropic.test_messages import result, tool_of, user
from tests.api.client import USER
from tests.api.fakes import ByteTokenizer
from tests.support.chat import prompt_builder
from tests.support.dialects import dialect_of

WITH_TOOLS = (
    "{%- if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}"
    "{% endfor %}\n</tools><|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{%- endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SEARCH = {"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {"query": "weather"}}
FOUND = {"type": "tool_reference", "tool_name": "Forecast"}
BEFORE = [tool_of("Bash"), tool_of("ToolSearch")]
# Where Claude Code puts it: in alphabetical order, in the middle.
AFTER = [tool_of("Bash"), tool_of("Forecast", defer_loading=True), tool_of("ToolSearch")]
SEARCHED = [USER, {"role": "assistant", "content": [SEARCH]}, user(result([FOUND]))]


def prompt_of(template: str, **fields: Any) -> Prompt:
    tokenizer = ByteTokenizer()
    dialect = dialect_of(template)
    chat_template = ChatTemplate(
        template, bos_text="", eos_text="", guard=Guard(tokenizer.special_strings)
    )
    builder = prompt_builder(chat_template, tokenizer, dialect)
    body = MessagesRequest.model_validate({"max_tokens": 1, **fields})
    return builder.from_conversation(conversation_of(body, MediaReader(MediaPolicy.TEXT)))


@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS])
def test_prompt_before_the_reference_is_a_prefix_of_the_one_behind_it(template: str) -> None:
    asked = prompt_of(template, messages=[USER], tools=BEFORE)
    loaded = prompt_of(template, messages=SEARCHED, tools=AFTER)
    assert "Bash" in asked.text
    assert loaded.tokens[: len(asked.tokens)] == asked.tokens
    assert "Forecast" not in asked.text
    assert loaded.text.count('"name": "Forecast"') == 1


def test_loaded_tool_can_be_called_and_one_that_waits_cannot() -> None:
    tools = [*AFTER, tool_of("Other", defer_loading=True)]
    prompt = prompt_of(WITH_TOOLS, messages=SEARCHED, tools=tools)
    dialect = dialect_of(WITH_TOOLS)
    uses = ToolUses(chosen(dialect), ByteTokenizer(), lambda _: None, finishes_calls=True)
    options = ReplyOptions(sampling=Sampling(), tool_choice=ToolChoice(ToolMode.REQUIRED))
    use = uses.plan(prompt, options)
    assert use.sampling.grammar is not None
    assert "Forecast" in use.sampling.grammar.source
    assert "Other" not in use.sampling.grammar.source
    assert use.schemas is not None
    assert set(use.schemas) == {"Bash", "ToolSearch", "Forecast"}


def test_loaded_tool_can_be_called_where_it_is_the_only_one() -> None:
    tools = [tool_of("Forecast", defer_loading=True)]
    prompt = prompt_of(WITH_TOOLS, messages=SEARCHED, tools=tools)
    assert prompt.conversation is not None
    assert set(schemas_of(prompt.conversation.callable_tools)) == {"Forecast"}
