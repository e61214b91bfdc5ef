"""What a ChatML prompt says, read from its tokens without the code that builds prompts."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rekindle.generation.tokenizer import Tokenizer

START, END = "<|im_start|>", "<|im_end|>"
# The generation prompt may close a thought before the model opens another.
_THOUGHTS = re.compile(r"(?:\s*<think>.*?</think>)*", re.DOTALL)
_MARK = re.compile("</?think>")
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_LISTED = re.compile(r"\[TOOL_CALLS\](\[.*\])", re.DOTALL)


@dataclass(frozen=True)
class SaidTurn:
    """An assistant message. Calls are canonical JSON, texts have no outer white space."""

    reasoning: str
    text: str
    calls: tuple[str, ...]


def meaning(tokens: Sequence[int], tokenizer: Tokenizer) -> list[str | SaidTurn]:
    """Return the messages of the prompt in order. All but whole turns are text, to the letter."""
    return [
        _turn(body.partition(END)[0]) if role == "assistant" and END in body else role + body
        for role, body in _messages(tokens, tokenizer)
    ]


def turns(tokens: Sequence[int], tokenizer: Tokenizer) -> list[SaidTurn]:
    return [each for each in meaning(tokens, tokenizer) if isinstance(each, SaidTurn)]


def _messages(tokens: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Split at control tokens: the same characters in a client's text are other tokens."""
    [start] = tokenizer.tokenize(START, parse_special=True)
    places = [i for i, token in enumerate(tokens) if token == start]
    for begin, end in zip([0, *places], [*places, len(tokens)], strict=True):
        text = tokenizer.detokenize(tokens[begin:end], render_special=True).decode()
        role, line, body = text.removeprefix(START).partition("\n")
        yield role, line + body


def _turn(body: str) -> SaidTurn:
    thoughts = _THOUGHTS.match(body)
    assert thoughts is not None
    rest = body[thoughts.end() :]
    listed = _LISTED.search(rest)
    calls = json.loads(listed[1]) if listed else map(json.loads, _CALL.findall(rest))
    text = _LISTED.sub("", _CALL.sub("", rest))
    reasoning = _MARK.sub("", thoughts[0]).strip()
    return SaidTurn(reasoning, text.strip(), tuple(json.dumps(c, sort_keys=True) for c in calls))
