"""Render a set of awkward conversations with every published template in a folder.

    python -m tests.campaigns.templates FOLDER

One line per template, and one more for each conversation that it refuses or breaks on.
Exits with 1 if anything broke: an error of ours, or the client's text taken for control tokens.
"""
# ruff: noqa: T201

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from jinja2 import TemplateError

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
from rekindle.chat.template.guard import Guard
from rekindle.chat.template.template import ChatTemplate
from rekindle.errors import InvalidRequest, StartupError

# Control tokens of published templates, by their look: the vocabularies are not at hand.
CONTROL_STRING = re.compile(
    r"<[|\uff5c][^<>'\"\s]+?[|\uff5c]>|\[/?[A-Z_]{3,}\]|</?(?:s|think|[a-z]+_[a-z]+)>"
)

TOOL = Tool(
    "weather",
    '{"type": "function", "function": {"name": "weather", "description": "Tells the weather.",'
    ' "parameters": {"type": "object", "properties": {"city": {"type": "string",'
    ' "description": "where"}, "days": {"type": "integer"}}, "required": ["city"]}}}',
)
SYSTEM = Message(Role.SYSTEM, (Text("sys-one"),))
CALL = ToolCall("call_abc_1", "weather", '{"city": "city-one", "days": 2}')
RESULT = Message(Role.TOOL, (ToolResult("call_abc_1", "weather", "result-one"),))


def user(text: str) -> Message:
    return Message(Role.USER, (Text(text),))


def answer(text: str) -> Message:
    return Message(Role.ASSISTANT, (Reasoning("why"), Text(text)))


FULL = Conversation(
    (
        SYSTEM,
        user("user-one"),
        Message(Role.ASSISTANT, (Reasoning("why"), CALL)),
        RESULT,
        answer("answer-one"),
        user("user-two"),
        answer("answer-two"),
        user("user-three"),
    ),
    (TOOL,),
)
CONVERSATIONS = {
    "full": FULL,
    "no tools given": replace(FULL, tools=()),
    "no tools at all": Conversation((SYSTEM, user("user-one"), answer("a"), user("user-two"))),
    "two systems": replace(FULL, messages=(Message(Role.SYSTEM, (Text("sys"),)), *FULL.messages)),
    "late system": Conversation(
        (
            SYSTEM,
            user("u"),
            answer("a"),
            Message(Role.SYSTEM, (Text("sys-late"),)),
            user("user-two"),
        )
    ),
    "system last": Conversation((SYSTEM, user("u"), answer("a"), user("v"), SYSTEM)),
    "two users": Conversation((user("user-one"), user("user-two"))),
    "empty content": Conversation((SYSTEM, user(""))),
    "call without text": Conversation(
        (user("user-one"), Message(Role.ASSISTANT, (CALL,)), RESULT), (TOOL,)
    ),
    "call with text": Conversation(
        (user("user-one"), Message(Role.ASSISTANT, (Text("text-one"), CALL)), RESULT), (TOOL,)
    ),
    "call with text, answered": Conversation(
        (
            user("user-one"),
            Message(Role.ASSISTANT, (Text("text-one"), CALL)),
            RESULT,
            answer("answer-one"),
            user("user-two"),
        ),
        (TOOL,),
    ),
    "thought, text and call": Conversation(
        (
            user("user-one"),
            Message(Role.ASSISTANT, (Reasoning("why"), Text("text-one"), CALL)),
            RESULT,
        ),
        (TOOL,),
    ),
    "user after result": Conversation(
        (user("user-one"), Message(Role.ASSISTANT, (CALL,)), RESULT, user("user-two")), (TOOL,)
    ),
    "open answer": Conversation(
        (SYSTEM, user("user-one"), Message(Role.ASSISTANT, (Text("answer-open "),))),
        continue_last=True,
    ),
}
MARKER = re.compile(r"\b(?:sys|user|answer|result|city|text)-[a-z]+")


def main() -> int:
    [folder] = map(Path, sys.argv[1:])
    outcomes: Counter[str] = Counter()
    for path in sorted(folder.glob("*.jinja")):
        problems = list(problems_of(path.read_text()))
        # In the order of the alphabet: broken, dropped, refused, rendered.
        outcome = min((kind for kind, _ in problems), default="rendered")
        outcomes[outcome] += 1
        print(f"{outcome:9} {path.stem}")
        for kind, reason in problems:
            print(f"          {kind}: {reason}")
    print(dict(outcomes))
    return 1 if outcomes["broken"] else 0


def problems_of(source: str) -> Iterator[tuple[str, str]]:
    special_strings = tuple(sorted(set(CONTROL_STRING.findall(source))))
    guard = Guard(special_strings)
    try:
        template = ChatTemplate(source, bos_text="<s>", eos_text="</s>", guard=guard)
    except StartupError as error:
        yield "broken", error.message
        return
    for name, conversation in CONVERSATIONS.items():
        try:
            text = "".join(
                piece.text for piece in template.render(conversation, add_generation_prompt=True)
            )
        except InvalidRequest as error:
            is_deliberate = type(error.__cause__) is TemplateError
            yield "refused" if is_deliberate else "broken", f"{name}: {error.message}"
        else:
            missing = [word for word in MARKER.findall(repr(conversation)) if word not in text]
            if missing:
                yield "dropped", f"{name}: {', '.join(missing)}"
    expected = n_control(template, guard, planted("plain"))
    for special in special_strings:
        for word in (special, special[1:], special[1:-1], f"{special[:2]}/think{special[2:]}"):
            if n_control(template, guard, planted(word)) > expected:
                yield "broken", f"the client's {word} became a control token"


def planted(word: str) -> Conversation:
    """The client's word in every place that a client can fill."""
    quoted = json.dumps(word)
    schema = f'{{"type": "object", "properties": {{{quoted}: {{"type": "string"}}}}, {quoted}: 1}}'
    function = f'{{"name": {quoted}, "description": {quoted}, "parameters": {schema}}}'
    return Conversation(
        (
            Message(Role.SYSTEM, (Text(word),)),
            user(word),
            Message(Role.ASSISTANT, (ToolCall("call_1", word, f"{{{quoted}: {quoted}}}"),)),
            Message(Role.TOOL, (ToolResult("call_1", word, word),)),
            Message(Role.ASSISTANT, (Reasoning(word), Text(word))),
            user(word),
        ),
        (Tool(word, f'{{"type": "function", "function": {function}}}'),),
    )


def n_control(template: ChatTemplate, guard: Guard, conversation: Conversation) -> int:
    try:
        pieces = template.render(conversation, add_generation_prompt=True)
    except InvalidRequest:
        return 0
    return sum(guard.n_special(piece.text) for piece in pieces if piece.parse_special)


if __name__ == "__main__":
    sys.exit(main())
