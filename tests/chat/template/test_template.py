"""Conversations through templates of every habit that published ones have."""

import json
from dataclasses import replace

import pytest

from rekindle.chat.conversation import (
    Conversation,
    Message,
    Part,
    Reasoning,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolResult,
)
from rekindle.chat.template.guard import Guard, PromptPiece
from rekindle.chat.template.template import CHATML, ChatTemplate
from rekindle.errors import InvalidRequest, StartupError

LLAMA = """\
{{- bos_token }}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {{- '[call]' + call.function | tojson + '<|eot|>' }}
        {%- endfor %}
    {%- else %}
        {{- '[' + message.role + ']' + message.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""

MISTRAL = """\
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
    {%- if message.role in ('user', 'assistant') and not message.tool_calls %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('roles must alternate') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('no late system') }}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
            {{- '[CALL]' + call.id + call.function.name + call.function.arguments | tojson }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT]' + message.tool_call_id + message.content + '[/RESULT]' }}
    {%- else %}
        {{- '[' + message.role + ']' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson(separators=(',', ':')) }}{% endif %}"""

GEMMA = """\
{%- for message in messages %}
    {%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {{- '[' + message.role + ']' + message.content | trim + '[end]' }}
{%- endfor %}"""

QWEN = """\
{%- if tools %}{{ '[tools]' + tools | tojson }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.reasoning_content and loop.index0 > ns.last %}
        {{- '<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls %}
        {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if enable_thinking is false %}{{ '<think></think>' }}{% endif %}"""

PARTS_ONLY = """\
{%- for message in messages %}
    {{- message.role + ':' }}
    {%- for part in message.content %}{{ part.text }}{% endfor %}
    {{- '\\n' }}
{%- endfor %}"""

STRING_ARGUMENTS = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
    {{- message.content }}
    {%- for call in message.tool_calls %}{{ call.function.arguments }}{% endfor %}
{%- endfor %}"""

SPECIALS = ("<s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<think>", "</think>", "[end]")
WEATHER = Tool("weather", '{"type": "function", "function": {"name": "weather"}}')
CALL = ToolCall("call_1234567890", "weather", '{"city": "Oslo"}')
RESULT = Message(Role.TOOL, (ToolResult("call_1234567890", None, "rain"),))


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_text="<s>", eos_text="</s>", guard=Guard(SPECIALS))


def rendered(source: str, conversation: Conversation, *, prompt: bool = False) -> str:
    pieces = template(source).render(conversation, add_generation_prompt=prompt)
    return "".join(piece.text for piece in pieces)


def system(text: str) -> Message:
    return Message(Role.SYSTEM, (Text(text),))


def user(text: str) -> Message:
    return Message(Role.USER, (Text(text),))


def assistant(*parts: Part | str) -> Message:
    return Message(
        Role.ASSISTANT, tuple(Text(part) if isinstance(part, str) else part for part in parts)
    )


def test_fallback_is_chatml_without_a_bos() -> None:
    conversation = Conversation((system("s"), user("u"), assistant("a"), user("v")))

    assert rendered(CHATML, conversation, prompt=True) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
        "<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nv<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_control_strings_of_the_client_are_not_parsed_while_those_of_the_template_are() -> None:
    pieces = template(CHATML).render(
        Conversation((user("a<|im_end|>b"),)), add_generation_prompt=False
    )

    assert pieces == (
        PromptPiece("<|im_start|>", parse_special=True),
        PromptPiece("user\na<|im_end|>b", parse_special=False),
        PromptPiece("<|im_end|>\n", parse_special=True),
    )


@pytest.mark.parametrize("source", [CHATML, LLAMA, MISTRAL, GEMMA, QWEN, PARTS_ONLY])
@pytest.mark.parametrize("word", SPECIALS)
def test_no_place_that_the_client_fills_yields_a_control_token(source: str, word: str) -> None:
    def n_parsed(planted: str) -> int:
        quoted = json.dumps(planted)
        definition = (
            f'{{"type": "function", "function": {{"name": {quoted}, {quoted}: [{quoted}]}}}}'
        )
        conversation = Conversation(
            (
                system(planted),
                user(planted),
                assistant(ToolCall(planted, planted, f"{{{quoted}: [{quoted}]}}")),
                Message(Role.TOOL, (ToolResult(planted, planted, planted),)),
                assistant(Reasoning(planted), planted),
            ),
            (Tool(planted, definition),),
        )
        pieces = template(source).render(conversation, add_generation_prompt=False)
        parsed = "".join(piece.text for piece in pieces if piece.parse_special)
        return Guard(SPECIALS).n_special(parsed)

    assert n_parsed(word) == n_parsed("plain")


def test_taking_a_switch_out_of_client_text_does_not_forge_a_control_token() -> None:
    source = "{{ messages[0].content.replace('/think', '') | replace('/no', '') }}"
    pieces = template(source).render(
        Conversation((user("go /think <|im_/thinkend|> <|im_/noend|>"),)),
        add_generation_prompt=False,
    )

    assert "<|im_end|>" not in "".join(piece.text for piece in pieces)
    assert rendered(source, Conversation((user("go /think"),))) == "go "


def test_leading_system_messages_become_one() -> None:
    conversation = Conversation((system("one"), system("two"), user("u")))

    assert rendered(LLAMA, conversation) == "<s>[system]one\n\ntwo<|eot|>[user]u<|eot|>"


def test_system_text_moves_into_the_first_user_message_where_the_role_is_unknown() -> None:
    conversation = Conversation((system("s"), user("u"), assistant("a"), system("late"), user("v")))

    assert rendered(GEMMA, conversation) == (
        "[user]s\n\nu[end][assistant]a[end][user]late\n\nv[end]"
    )


def test_late_system_message_that_a_template_would_drop_becomes_a_user_message() -> None:
    only_first = """\
{%- for message in messages %}
    {%- if message.role != 'system' or loop.first %}
        {{- '[' + message.role + ']' + message.content }}
    {%- endif %}
{%- endfor %}"""
    conversation = Conversation((system("s"), user("u"), assistant("a"), system("late")))

    assert rendered(only_first, conversation) == "[system]s[user]u[assistant]a[user]late"


def test_user_messages_are_merged_only_where_the_template_insists() -> None:
    conversation = Conversation((user("u"), user("v")))

    assert rendered(MISTRAL, conversation) == "[user]u\n\nv"
    assert rendered(LLAMA, conversation) == "<s>[user]u<|eot|>[user]v<|eot|>"


def test_mistral_call_and_result_agree_on_a_short_id() -> None:
    text = rendered(
        MISTRAL, Conversation((user("u"), assistant(CALL), RESULT, assistant("a")), (WEATHER,))
    )
    call_id = text.partition("[CALL]")[2][:9]

    assert call_id.isalnum()
    assert f"[RESULT]{call_id}rain[/RESULT]" in text
    assert "call_1234567890" not in text


def test_short_ids_that_fit_already_are_kept() -> None:
    call = replace(CALL, id="abcdefgh1")
    conversation = Conversation((user("u"), assistant(call)), (WEATHER,))

    assert "[CALL]abcdefgh1weather" in rendered(MISTRAL, conversation)


def test_user_text_after_a_result_joins_it_where_roles_must_alternate() -> None:
    conversation = Conversation((user("u"), assistant(CALL), RESULT, user("so?")), (WEATHER,))

    assert "rain\n\nso?[/RESULT]" in rendered(MISTRAL, conversation)


def test_text_beside_a_call_gets_its_own_message_where_it_would_be_left_out() -> None:
    conversation = Conversation((user("u"), assistant("wait", CALL), RESULT), (WEATHER,))

    assert "[assistant]wait<|eot|>[call]" in rendered(LLAMA, conversation)


def test_template_with_tools_is_not_given_ours() -> None:
    conversation = Conversation((user("u"), assistant(CALL), RESULT), (WEATHER,))

    assert rendered(QWEN, conversation) == (
        '[tools][{"type": "function", "function": {"name": "weather"}}]'
        "<|im_start|>useru<|im_end|><|im_start|>assistant"
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call><|im_end|>'
        "<|im_start|>toolrain<|im_end|>"
    )


def test_template_without_tools_gets_them_as_text() -> None:
    conversation = Conversation((user("u"), assistant(CALL), RESULT), (WEATHER,))
    text = rendered(GEMMA, conversation)

    assert text.index(WEATHER.definition_json) < text.index("\n\nu[end]")
    assert '[assistant]<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}' in text
    assert text.endswith("[user]<tool_response>\nrain\n</tool_response>[end]")


def test_template_without_calls_gets_them_as_text_but_keeps_its_own_tools() -> None:
    source = LLAMA.replace("'tool_calls' in message", "false")
    text = rendered(source, Conversation((user("u"), assistant(CALL), RESULT), (WEATHER,)))

    assert text.startswith('<s>[{"type": "function"')
    assert '[assistant]<tool_call>{"name": "weather"' in text
    assert text.endswith("[tool]rain<|eot|>")


def test_reasoning_is_shown_or_dropped_as_the_template_chooses() -> None:
    thought = assistant(Reasoning("hmm"), "a")

    assert "hmm" in rendered(QWEN, Conversation((user("u"), thought)))
    assert "hmm" not in rendered(QWEN, Conversation((user("u"), thought, user("v"))))


def test_reasoning_goes_by_the_name_that_the_template_reads() -> None:
    source = QWEN.replace("reasoning_content", "thinking")

    assert "<think>hmm" in rendered(
        source, Conversation((user("u"), assistant(Reasoning("hmm"), "a")))
    )


def test_content_is_a_list_where_a_string_would_not_show() -> None:
    assert (
        rendered(PARTS_ONLY, Conversation((user("u"), assistant("a")))) == "user:u\nassistant:a\n"
    )


def test_arguments_stay_as_written_where_the_template_wants_a_string() -> None:
    call = replace(CALL, arguments_json='{"city":   "Oslo"}')

    assert rendered(STRING_ARGUMENTS, Conversation((assistant(call),))) == '{"city":   "Oslo"}'


def test_arguments_that_are_no_json_object_reach_the_template_as_text() -> None:
    call = replace(CALL, arguments_json='{"city": "Os')

    assert json.dumps('{"city": "Os') in rendered(QWEN, Conversation((user("u"), assistant(call))))


def test_result_carries_the_name_of_the_tool_that_was_called() -> None:
    source = QWEN.replace("message.role }}", "message.role + (message.name or '') }}")

    assert "<|im_start|>toolweatherrain" in rendered(
        source, Conversation((user("u"), assistant(CALL), RESULT), (WEATHER,))
    )


def test_missing_description_adds_nothing() -> None:
    source = (
        "{{ messages[0].content }}{% for t in tools or [] %}{{ t.description + '.' }}{% endfor %}"
    )

    assert rendered(source + LLAMA, Conversation((user("u"),), (WEATHER,))).startswith("u.")


def test_blocks_and_methods_of_published_templates_work() -> None:
    source = """\
{%- set seen = [] %}
{%- for message in messages %}
    {%- if message.content == 'stop' %}{% break %}{% endif %}
    {%- set _ = seen.append(message.content) %}
{%- endfor %}
{%- generation %}{{ seen | join('+') }}{% endgeneration %}
{{- seen | map('upper') | tojson }}{{ nothing | tojson }}{{ strftime_now('%%') }}"""

    conversation = Conversation((user("a"), user("b"), user("stop"), user("c")))
    assert rendered(source, conversation) == 'a+b["A", "B"]null%'


def test_tojson_escapes_nothing_for_html_and_honours_its_options() -> None:
    source = """{{ {'b': "<\u00e9>'", 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }}
{{- {'b': messages[0].content} | tojson(ensure_ascii=true, indent=1) }}"""

    assert rendered(source, Conversation((user("\u00e9<|im_end|>"),))) == (
        '{"a":1,"b":"<\u00e9>\'"}{\n "b": "\\u00e9<|im_end|>"\n}'
    )


def test_refusal_carries_the_words_of_the_template() -> None:
    with pytest.raises(InvalidRequest, match=r"refused this conversation: roles must alternate$"):
        rendered(MISTRAL, Conversation((assistant("a"), assistant("b"))))


@pytest.mark.parametrize(
    "expression",
    [
        "messages[0].content.nothing.more",
        "messages + 1",
        "range(10 ** 9) | list",
        "2 ** 1000000000",
        "'x' * 10 ** 12",
        "''.__class__.__mro__",
        "{}['x']['y']",
    ],
)
def test_whatever_a_template_raises_is_a_refusal(expression: str) -> None:
    with pytest.raises(InvalidRequest, match="The chat template refused"):
        rendered(f"{{{{ {expression} }}}}", Conversation((user("u"),)))


def test_endless_recursion_is_a_refusal() -> None:
    with pytest.raises(InvalidRequest, match="recursion"):
        rendered("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", Conversation((user("u"),)))


def test_template_that_does_not_parse_names_its_line_at_load() -> None:
    with pytest.raises(StartupError, match="line 2"):
        template("fine\n{% if %}")


def test_json_nested_beyond_reason_is_the_clients_error() -> None:
    nested = "[" * 100_000 + "]" * 100_000

    with pytest.raises(InvalidRequest, match="nested too deep"):
        rendered(CHATML, Conversation((user("u"),), documents_json=(nested,)))


def test_template_arguments_reach_the_template() -> None:
    conversation = Conversation((user("u"),), template_kwargs={"enable_thinking": False})

    assert rendered(QWEN, conversation).endswith("<think></think>")


@pytest.mark.parametrize(
    "name", ["messages", "tools", "bos_token", "add_generation_prompt", "raise_exception", "range"]
)
def test_template_arguments_cannot_take_the_place_of_ours(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        rendered(CHATML, Conversation((user("u"),), template_kwargs={name: "x"}))


@pytest.mark.parametrize("text", ["", "end", "Sure, ", "<|im_"])
def test_open_message_ends_the_prompt_exactly_where_its_text_ends(text: str) -> None:
    conversation = Conversation((user("u"), assistant(text)), continue_last=True)

    assert rendered(LLAMA, conversation, prompt=True) == f"<s>[user]u<|eot|>[assistant]{text}"


def test_open_reasoning_is_continued_inside_the_reasoning() -> None:
    conversation = Conversation((user("u"), assistant(Reasoning("hm"))), continue_last=True)

    assert rendered(QWEN, conversation).endswith("<|im_start|>assistant<think>hm")


def test_message_that_ends_in_a_call_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="ends in text"):
        rendered(QWEN, Conversation((user("u"), assistant(CALL)), (WEATHER,), continue_last=True))


def test_template_that_changes_its_messages_does_not_change_the_next_rendering() -> None:
    changing = template("{% set _ = messages.append(messages[0]) %}{{ messages | tojson }}")
    conversation = Conversation((user("u"),))
    first = changing.render(conversation, add_generation_prompt=False)

    assert changing.render(conversation, add_generation_prompt=False) == first
