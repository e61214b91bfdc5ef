"""Tools told in plain text."""

from rekindle.chat.conversation import (
    Conversation,
    Message,
    Reasoning,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolResult,
)
from rekindle.chat.template.toolless import describe_tools, quote_results, write_out_calls

WEATHER = Tool("weather", '{"type": "function", "function": {"name": "weather"}}')


def test_definitions_follow_the_text_of_the_system_message() -> None:
    system = Message(Role.SYSTEM, (Text("Be brief."),))
    told = describe_tools(Conversation((system,), (WEATHER,)))

    assert told.tools == ()
    assert told.messages[0].text.startswith("Be brief.\n\n")
    assert WEATHER.definition_json in told.messages[0].text


def test_definitions_bring_a_system_message_where_there_is_none() -> None:
    user = Message(Role.USER, (Text("hi"),))
    system, rest = describe_tools(Conversation((user,), (WEATHER,))).messages

    assert system.role is Role.SYSTEM
    assert rest == user


def test_conversation_without_tools_is_not_touched() -> None:
    conversation = Conversation((Message(Role.USER, (Text("hi"),)),))

    assert quote_results(write_out_calls(describe_tools(conversation))) == conversation


def test_calls_keep_their_arguments_as_they_were_written() -> None:
    calls = (ToolCall("1", 'a"b', '{"x":  1}'), ToolCall("2", "c", ""))
    message = Message(Role.ASSISTANT, (Reasoning("why"), Text("Let me see."), *calls))
    [written] = write_out_calls(Conversation((message,))).messages

    assert written.text == (
        'Let me see.\n<tool_call>{"name": "a\\"b", "arguments": {"x":  1}}</tool_call>'
        '\n<tool_call>{"name": "c", "arguments": {}}</tool_call>'
    )
    assert Reasoning("why") in written.parts


def test_results_of_one_turn_share_one_user_message() -> None:
    results = [Message(Role.TOOL, (ToolResult(str(n), None, f"r{n}"),)) for n in range(2)]
    user = Message(Role.USER, (Text("and?"),))
    quoted = quote_results(Conversation((*results, user))).messages

    assert quoted == (
        Message(
            Role.USER,
            (Text("<tool_response>\nr0\n</tool_response>\n<tool_response>\nr1\n</tool_response>"),),
        ),
        user,
    )
