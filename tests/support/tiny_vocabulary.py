"""A byte-level BPE vocabulary of about 600 tokens, trained here so that tests need no donor model.

Every byte is a token, frequent English, JSON and code have merges, and the control tokens are
ChatML's. Equal on every run.
"""

import re
from collections import Counter
from functools import cache
from itertools import pairwise
from typing import NamedTuple

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

N_MERGES = 320  # picked; the vocabulary is then about 600 tokens

SAMPLE = """
You are a helpful assistant. The user asks a question and the assistant answers the question.
This is the first message of the conversation, and that is the second one. When the tool returns
a result, read the result before you write the next answer. What is the weather in Paris today?
Hello, world! There was once a server that kept every prefix it had ever computed, and it never
computed the same prefix twice. Then the other server came, with another prompt, and they waited
for the first token together. I think that we should start with the tests and then change the code.
Once upon a time there were three little words. They would not have been here without the others.
{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}
{"name": "read_file", "arguments": {"path": "src/main.py", "offset": 10, "limit": 200}}
{"type": "object", "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
"required": ["name", "count"], "items": [{"id": 1, "value": true}, {"id": 2, "value": false}]}
def read_file(path: str, offset: int = 0) -> str:
    with open(path) as file:
        return file.read()[offset:]
class Server:
    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
    def start(self) -> int:
        for item in range(self.count):
            if item is None:
                return self.count
        return 0
"""


class Vocabulary(NamedTuple):
    tokens: list[str]  # in GPT-2's alphabet: one printable character for each byte
    merges: list[str]  # "left right", in order of rank

    def id(self, token: str) -> int:
        return self.tokens.index(token)


@cache
def vocabulary() -> Vocabulary:
    alphabet = _byte_alphabet()
    # The same cuts as llama.cpp's "gpt-2" pre-tokenizer makes, or the merges could not apply.
    pieces = re.findall(r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", SAMPLE)
    words = Counter(tuple(alphabet[byte] for byte in piece.encode()) for piece in pieces)
    merges: list[str] = []
    tokens = sorted(alphabet)
    for _ in range(N_MERGES):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        left, right = best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(f"{left} {right}")
        if left + right not in tokens:
            tokens.append(left + right)
        words = Counter({_merged(word, best): count for word, count in words.items()})
    return Vocabulary([*tokens, *CONTROL_TOKENS], merges)


@cache
def no_words() -> tuple[int, ...]:
    """Tokens whose text is not a word by itself: a reply without them can be told by its text."""
    tokens = enumerate(vocabulary().tokens)
    return tuple(number for number, token in tokens if not re.fullmatch("\u0120?[A-Za-z]+", token))


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return tuple(out)


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself where printable, else from 256 upward."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]
