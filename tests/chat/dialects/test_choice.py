"""Which dialect a model gets, and what the operator is told."""

from dataclasses import replace

import pytest

from rekindle.chat.conversation import Conversation, Message, Role, Text, Tool, ToolCall
from rekindle.chat.dialects.base import Dialect
from rekindle.chat.dialects.choice import NAMES, Origin, apply, choose
from rekindle.chat.dialects.derive.derivation import derive
from rekindle.chat.dialects.syntax.lark import Schemas, quote
from rekindle.chat.reply.parser import parse
from rekindle.chat.template.template import CHATML, ChatTemplate
from rekindle.errors import StartupError
from tests.chat.dialects.derive.shapes import JSON_OBJECT, Shape, each, loaded

DERIVABLE = Shape(calls=each("{{- '<do>' }}" + JSON_OBJECT + "{{- '</do>' }}"))
# Channels, in the order that the published template writes them.
HARMONY = """\
{%- for tool in tools or [] %}{{- tool.function.name }}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json' }}
            {{- '<|message|>' + call.arguments | tojson + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
WITHOUT_CALLS = """\
{%- if tools %}{{- 'Call with MARK:' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}
{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}
"""  # noqa: E501
TOOL = Tool("now", '{"type": "function", "function": {"name": "now", "description": "the time"}}')
ASKED = Conversation((Message(Role.USER, (Text("When?"),)),), (TOOL,))


def rendered(template: ChatTemplate) -> str:
    pieces = template.render(ASKED, add_generation_prompt=True)
    return "".join(piece.text for piece in pieces)


def test_a_template_that_writes_calls_gets_its_own_dialect() -> None:
    choice = choose(DERIVABLE.template)
    assert choice.origin is Origin.DERIVED
    assert choice.line == "derived: JSON between <do> and </do>"


def test_a_template_without_tools_gets_the_generic_description() -> None:
    choice = choose(loaded(CHATML))
    assert choice.origin is Origin.GENERIC
    assert choice.describes_tools
    assert choice.was_expected


def test_a_template_that_writes_no_calls_never_gets_a_guess() -> None:
    template = loaded(WITHOUT_CALLS.replace("MARK", "<call>"))
    choice = choose(template)
    assert choice.origin is Origin.GENERIC
    assert choice.line == "generic form: the template writes no calls"
    assert not choice.was_expected  # the operator is warned
    assert "Call with" in rendered(template)
    template.write_tools_as_text()
    assert "Call with" not in rendered(template)  # one description of tools, not two
    assert '"name": "now"' in rendered(template)


@pytest.mark.parametrize(
    ("mark", "name"), [("<|tool_call|>", "granite"), ("<|tool_call_start|>", "lfm2")]
)
def test_a_family_by_hand_knows_calls_that_its_template_does_not_write(
    mark: str, name: str
) -> None:
    choice = choose(loaded(WITHOUT_CALLS.replace("MARK", mark)))
    assert (choice.dialect.name, choice.origin) == (name, Origin.BY_HAND)


def test_a_family_by_hand_is_used_only_if_it_reads_what_the_template_writes() -> None:
    choice = choose(loaded(HARMONY))
    assert (choice.dialect.name, choice.origin) == ("harmony", Origin.BY_HAND)
    other = choose(loaded(HARMONY.replace("to=functions.", "for:")))
    assert other.origin is Origin.DERIVED


# One call as bare JSON, like the published template; the tag stands in it for other tools.
LLAMA = Shape(
    calls="""{%- set call = message.tool_calls[0].function %}
    {%- if message.tool_calls | length > 1 %}{{- raise_exception('one call') }}{%- endif %}
    {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {#- <|python_tag|> #}"""
).source


def test_llama_reads_a_tag_that_its_template_does_not_write() -> None:
    choice = choose(loaded(LLAMA))
    assert (choice.dialect.name, choice.origin) == ("llama3", Origin.BY_HAND)
    derived = derive(loaded(LLAMA)).dialect
    assert derived is not None
    schemas: Schemas = {"now": {"type": "object"}}
    text = '<|python_tag|>{"name": "now", "parameters": {}}'

    def calls(dialect: Dialect) -> int:
        return len(parse(dialect, schemas, text, begins_in_reasoning=False).calls)

    assert calls(choice.dialect) == 1
    assert calls(derived) == 0


def test_a_family_by_hand_writes_no_more_calls_than_its_template() -> None:
    choice = choose(loaded(HARMONY))
    grammar = choice.dialect.grammar({"now": {}}, parallel=True, literal=quote)
    alone = choice.dialect.grammar({"now": {}}, parallel=False, literal=quote)
    assert grammar == alone


@pytest.mark.parametrize("text", ["", "[1]", "{{ tools }}{{ messages[0].tool_calls[9] }}"])
def test_no_template_keeps_a_model_from_loading(text: str) -> None:
    assert choose(loaded(text + "<|channel|><|python_tag|>")).origin is Origin.GENERIC


def test_a_named_family_also_writes_earlier_calls() -> None:
    assert choose(loaded(WITHOUT_CALLS), name="lfm2").format is not None


def test_the_setting_takes_precedence() -> None:
    for name in NAMES:
        choice = choose(DERIVABLE.template, name=name)
        assert (choice.dialect.name, choice.origin) == (name, Origin.SETTING)
    with pytest.raises(StartupError, match="hermes"):
        choose(DERIVABLE.template, name="klingon")


@pytest.mark.parametrize(
    ("source", "opening"),
    [
        (CHATML, "<think>"),  # models write it even without instruction
        (CHATML + "{#- [THINK] #}", "[THINK]"),
        (DERIVABLE.source, "<muse>"),
        (HARMONY, "<|channel|>analysis<|message|>"),
    ],
)
def test_thoughts_are_marked_as_the_template_marks_them(source: str, opening: str) -> None:
    marks = choose(loaded(source)).dialect.reasoning
    assert marks is not None
    assert marks.opening == opening


def test_earlier_calls_are_written_in_the_familys_form_if_the_template_writes_none() -> None:
    template = loaded(WITHOUT_CALLS.replace("MARK", "<|tool_call_start|>"))
    apply(choose(template), template)
    call = Message(Role.ASSISTANT, (Text("So:"), ToolCall("1", "now", '{"zone": "it\'s"}')))
    conversation = replace(ASKED, messages=(*ASKED.messages, call))
    pieces = template.render(conversation, add_generation_prompt=False)
    text = "".join(piece.text for piece in pieces)
    assert 'So:\n<|tool_call_start|>[now(zone="it\'s")]<|tool_call_end|>' in text
