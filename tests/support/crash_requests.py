"""Requests of mixed kinds whose replies do not depend on noise.

After a crash some rows are computed in other chunks and beside other sequences. Their last bits
differ, and near ties would be decided another way. Each request here avoids near ties:

- greedy: at every token the best candidate leads by more than the noise (`least_lead`);
- seeded at a huge temperature: every allowed token is equally likely, to the last bit of a float,
  so the reply is a pure function of seed, position and grammar;
- forced: penalties leave one candidate.
"""

import random
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx

from tests.support.clear_replies import COUNTING, lead
from tests.support.tiny_models import TinyArchitecture
from tests.support.wire_replies import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, Body
from tests.support.workloads import Message, assistant, prose, user

EMBEDDED = "embedded"
TINY_LEAD = 0.02  # other chunks and other company move a logprob of a tiny model by 0.011 at most
N_GREEDY_TOKENS = 40  # of tiny models: longer replies without a near tie are too rare
N_LONG_WORDS = 700
UNIFORM: Body = {"temperature": 1e10, "top_k": 0, "top_p": 1, "min_p": 0}

LINE = (
    *("the ship sails to the north", "the train goes to the south"),
    *("the car drives to the east", "the plane flies to the west", "the dog runs in the park"),
    *("the cat sleeps on the chair", "the bird sings in the tree", "the boy reads in the book"),
)
CLEAR_ORDERS = (0, 2, 6, 7)  # of the line's parts: repeated with a lead of more than 2
# The prompts at which the search for clear replies ended here: four chats, two texts.
FIRST_SALTS = {
    TinyArchitecture.GEMMA3: (12, 1009, 2039, 3000, 4020, 5001),
    TinyArchitecture.QWEN35: (10, 1041, 2044, 3007, 4039, 5031),
    TinyArchitecture.MAMBA2: (7, 1018, 2001, 3062, 4038, 5113),
}

PAINT = {
    "type": "object",
    "properties": {
        "colours": {
            "type": "array",
            "items": {"enum": ["red", "green", "blue", "black", "white"]},
            "minItems": 8,
            "maxItems": 8,
        },
        "title": {"type": "string", "pattern": "^[a-z ]{20}$"},
    },
    "required": ["colours", "title"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class CrashRequest:
    name: str
    route: str
    body: Body


def crash_requests(client: httpx.Client, model: str) -> list[CrashRequest]:
    """The requests for a model that this server serves."""
    if model == EMBEDDED:
        chats = [_repeated(order) for order in CLEAR_ORDERS]
        texts = [f"{prose('a head', n_words)}\n{COUNTING}" for n_words in (60, N_LONG_WORDS)]
        n_tokens = 60
    else:
        starts = FIRST_SALTS[TinyArchitecture(model)]
        chats = [[user(_clear(client, CHAT, 40, start))] for start in starts[:4]]
        texts = [
            _clear(client, COMPLETIONS, n_words, start)
            for n_words, start in zip((60, N_LONG_WORDS), starts[4:], strict=True)
        ]
        n_tokens = N_GREEDY_TOKENS
    return [
        *_greedy(chats, texts, n_tokens),
        _stopped(client, texts[0], n_tokens),
        *_seeded(),
        CrashRequest("penalties", COMPLETIONS, {**_penalised(client), **_streamed()}),
        CrashRequest("embeddings", EMBEDDINGS, {"input": [prose("e", 90), prose("f", 200)]}),
    ]


def _greedy(chats: list[list[Message]], texts: list[str], n: int) -> list[CrashRequest]:
    scored = {"logprobs": True, "top_logprobs": 3}
    first = {"messages": chats[0], "max_tokens": n, **scored, **_streamed()}
    second = {"input": chats[1], "max_output_tokens": n, "stream": True}
    second |= {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    third = {"messages": chats[2], "model": "any", "max_tokens": n, "stream": True}
    fourth = {"messages": chats[3], "max_tokens": n}
    long = {"prompt": texts[1], "max_tokens": n, **_streamed()}
    return [
        CrashRequest("chat with logprobs", CHAT, {**first, "temperature": 0}),
        CrashRequest("responses", RESPONSES, {**second, "temperature": 0}),
        CrashRequest("messages", MESSAGES, {**third, "temperature": 0}),
        CrashRequest("chat, not streamed", CHAT, {**fourth, "temperature": 0}),
        CrashRequest("long prompt", COMPLETIONS, {**long, "temperature": 0}),
    ]


def _stopped(client: httpx.Client, text: str, n_tokens: int) -> CrashRequest:
    """The stop string is cut from the reply's second half, in the middle of a token."""
    body = {"prompt": text, "max_tokens": n_tokens, "temperature": 0}
    reply = _post(client, COMPLETIONS, body)["choices"][0]["text"]
    half = len(reply) // 2
    stop = next(
        piece
        for start in range(half, len(reply))
        if reply.find(piece := reply[start : start + 5]) >= half and "\ufffd" not in piece
    )
    return CrashRequest("stop string", COMPLETIONS, {**body, "stop": stop, **_streamed()})


def _seeded() -> list[CrashRequest]:
    tools = [_tool("paint", PAINT), _tool("draw", PAINT)]
    chat = {"messages": [user("Paint a picture.")], "max_tokens": 250, **UNIFORM}
    shape = {"type": "json_schema", "json_schema": {"name": "picture", "schema": PAINT}}
    text = {"prompt": "Any token at all:", "max_tokens": 120, "ignore_eos": True, **UNIFORM}
    called = {"tools": tools, "tool_choice": "required"}
    once = {**called, "parallel_tool_calls": False}
    bodies: dict[str, tuple[str, Body]] = {
        "a tool call": (CHAT, {**chat, **once, "seed": 11}),
        "several tool calls": (CHAT, {**chat, **called, "seed": 16, "max_tokens": 150}),
        "schema": (CHAT, {**chat, "response_format": shape, "seed": 12}),
        "three replies": (CHAT, {**chat, "response_format": shape, "seed": 13, "n": 3}),
        "any token": (COMPLETIONS, {**text, "seed": 14, "logprobs": 2}),
    }
    return [
        CrashRequest(name, route, {**body, **_streamed()}) for name, (route, body) in bodies.items()
    ]


def _penalised(client: httpx.Client) -> Body:
    """Nine tokens tower above all others, and the last eight sampled are held back.

    The first nine tokens may depend on near ties, so they are part of the prompt.
    """
    letters = [_post(client, "/tokenize", {"content": f" {a}"})["tokens"] for a in "abcdefghi"]
    tokens = [each[-1] for each in letters]
    assert len(set(tokens)) == len(letters)
    return {
        "prompt": [*_post(client, "/tokenize", {"content": "Go on:"})["tokens"], *tokens],
        "max_tokens": 90,
        "logit_bias": {str(token): 100 for token in tokens},
        "repeat_penalty": 1e6,
        "repeat_last_n": 8,
        "temperature": 0.8,
        "seed": 15,
    }


def _tool(name: str, parameters: Body) -> Body:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _streamed() -> Body:
    return {"stream": True, "stream_options": {"include_usage": True}}


def _repeated(order: int) -> list[Message]:
    parts = list(LINE)
    random.Random(order).shuffle(parts)
    line = " and ".join(parts)
    shown = [user(f"Say: {line}"), assistant(line)]
    return [*shown, *shown, user(f"Say: {line}")]


def _clear(client: httpx.Client, route: str, n_words: int, start: int) -> str:
    """Return the first text, from this number on, to which the model's reply is clear."""
    for number in count(start):
        text = f"{number}: {prose(str(number), n_words)}"
        if least_lead(client, route, text) > TINY_LEAD:
            return text
    raise AssertionError


def least_lead(client: httpx.Client, route: str, text: str) -> float:
    """The least lead over the tokens of a greedy reply; 0 if the reply is short."""
    body: Body = {"max_tokens": N_GREEDY_TOKENS, "temperature": 0}
    if route == CHAT:
        asked = {"messages": [user(text)], "logprobs": True, "top_logprobs": 2}
    else:
        asked = {"prompt": text, "logprobs": 2}
    [choice] = _post(client, route, {**body, **asked})["choices"]
    scores = choice["logprobs"] or {}  # none of an empty reply
    steps = [[top["logprob"] for top in step["top_logprobs"]] for step in scores.get("content", ())]
    steps += [list(top.values()) for top in scores.get("top_logprobs", ())]
    if len(steps) < N_GREEDY_TOKENS or min(map(len, steps)) < 2:
        return 0.0
    return min(map(lead, steps))


def _post(client: httpx.Client, route: str, body: Body) -> Any:
    response = client.post(route, json=body)
    response.raise_for_status()
    return response.json()
