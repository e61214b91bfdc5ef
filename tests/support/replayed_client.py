"""Recorded traffic of real agents, and a server that gives the recorded replies.

A trace is a file of JSON lines, one request and its reply on each. The recorded clients send back
the replies of another server. Our server gives the same replies, token by token through the engine.
So the memory of turns meets replies exactly as real clients rewrite them.
"""

import gzip
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rekindle.config.cache import CacheSettings
from rekindle.config.choices import ReasoningHistory
from rekindle.config.declare import Bytes
from rekindle.config.engine import EngineSettings
from rekindle.config.model import ChatSettings, ModelSettings
from rekindle.config.settings import Settings
from rekindle.engine_process.loaded import LoadedEngine
from rekindle.generation.events import TokenSampled
from rekindle.generation.model_state import Payload
from rekindle.generation.request import Sampling
from rekindle.link.messages import Load
from rekindle.llama.model import VocabularyFile
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from rekindle.models import llama_model as loaded_model
from rekindle.models.source import ModelFile
from rekindle.server.assembly import assemble
from rekindle.server.serving import background
from tests.support.fake_backend import FakeBackend, FakeSampler
from tests.support.fake_embedder import FakeEmbedder
from tests.support.thread_process import Fate, ThreadProcess, loaded_engine
from tests.support.tiny_vocabulary import TURN_END

# As Qwen 3 writes: tools in the system message, calls in tags, and reasoning only behind the last
# user message.
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif -%}
# Tools{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
Write calls as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- (message.content or '').lstrip('\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content }}
        {{- '\n</tool_response><|im_end|>\n' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# A model's tokens are not always those that a tokenizer makes of the same text: where the reply
# is cut into lines of so many characters, ours differ, and only remembered turns hit. Picked.
CUT_CHARACTERS = 40

REPLY = "the reply"  # as a role: the last message before those that are new

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recorded:
    client: str
    seq: int
    previous: int | None  # the request before it in its conversation
    api: str | None
    path: str
    headers: dict[str, str]
    body: Body
    reply: Body  # the message that the upstream sent


def read_trace(path: Path) -> list[Recorded]:
    client = path.name.partition(".jsonl")[0]
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        Recorded(
            client=client,
            seq=row["seq"],
            previous=row["prev"],
            api=row["api"],
            path=row["path"],
            headers=row["headers"],
            body=row["body"],
            reply=(row["reply"] or {}).get("message") or {},
        )
        for row in rows
    ]


@dataclass(frozen=True, slots=True)
class Spoken:
    """A reply or a message of the history, by what it means."""

    role: str
    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]  # name, arguments

    @property
    def key(self) -> str:
        """Reasoning is not in it: clients may leave it out."""
        return json.dumps([self.role, self.text, self.calls])


def spoken(message: Body) -> Spoken:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(part.get("text") or "" for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if role == "assistant":
        if found := re.match(r"\s*<think>(.*?)</think>", content, re.DOTALL):
            reasoning, content = found[1], content[found.end() :]
        content = content.strip()
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = tuple((each["name"], _sorted_json(each["arguments"])) for each in functions)
    return Spoken(role, content, reasoning.strip(), calls)


def _sorted_json(source: str) -> str:
    try:
        return json.dumps(json.loads(source or "{}", parse_float=_number), sort_keys=True)
    except ValueError:
        return source


def _number(text: str) -> float:
    """JavaScript has one kind of number: 1.0 comes back as 1."""
    value = float(text)
    return int(value) if value.is_integer() else value


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a request differs from the previous one and its reply."""

    index: int | None  # of the message
    role: str
    field: str
    before: str
    after: str

    @property
    def is_in_reply(self) -> bool:
        return self.role == REPLY


def first_difference(before: Recorded, after: Recorded) -> Difference | None:
    """None: the history came back with the same meaning."""
    tools = [_sorted_json(json.dumps(each.body.get("tools") or [])) for each in (before, after)]
    if tools[0] != tools[1]:
        return Difference(None, "-", "tools", *_apart(*tools))
    expected = [*map(spoken, before.body["messages"]), spoken(before.reply)]
    found = [*map(spoken, after.body["messages"])]
    for index, one in enumerate(expected):
        if index >= len(found):
            return Difference(index, one.role, "message is gone", one.text[:60], "")
        other = found[index]
        is_reply = index == len(expected) - 1
        role = REPLY if is_reply else one.role
        if one.role != other.role:
            return Difference(index, role, "role", *(f"{s.role}: {s.text}" for s in (one, other)))
        if one.text != other.text:
            return Difference(index, role, "text", *_apart(one.text, other.text))
        if one.calls != other.calls:
            calls = (json.dumps(each.calls) for each in (one, other))
            return Difference(index, role, "call arguments", *_apart(*calls))
        if other.reasoning and one.reasoning != other.reasoning:
            return Difference(index, role, "reasoning", *_apart(one.reasoning, other.reasoning))
    return None


def _apart(before: str, after: str) -> tuple[str, str]:
    """Return both texts from a little before their first difference."""
    shared = n_shared(before, after)
    start = max(shared - 15, 0)
    return before[start:], after[start:]


def n_shared(before: Sequence[Any], after: Sequence[Any]) -> int:
    pairs = enumerate(zip(before, after, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(before), len(after)))


class Ids:
    """Our ids of tool calls in place of the recorded ones, with what the client did to them."""

    def __init__(self) -> None:
        self._ours: dict[str, str] = {}

    def learn(self, recorded: Body, ours: Sequence[str]) -> None:
        calls = recorded.get("tool_calls") or []
        for call, our_id in zip(calls, ours, strict=False):
            self._ours[call["id"]] = our_id
            self._ours[call["id"].replace("_", "")] = our_id.replace("_", "")

    def put_into(self, body: Body) -> Body:
        text = json.dumps(body)
        for recorded, ours in self._ours.items():
            text = text.replace(recorded, ours)
        changed: Body = json.loads(text)
        return changed


def written(reply: Body) -> str:
    """The reply as a model of this template writes it; arguments keep their bytes."""
    reasoning = reply.get("reasoning_content") or reply.get("reasoning")
    parts = [f"<think>\n{reasoning}\n</think>\n\n"] if reasoning else []
    parts.append(reply.get("content") or "")
    for index, call in enumerate(reply.get("tool_calls") or ()):
        function = call["function"]
        line = "\n" if index or reply.get("content") else ""
        named = f'{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}'
        parts.append(f"{line}<tool_call>\n{named}\n</tool_call>")
    return "".join(parts)


@dataclass(slots=True)
class Script:
    """Replies to give, and the prompts they were given to, by the seed of the request."""

    replies: dict[int, tuple[int, ...]] = field(default_factory=dict)
    prompts: dict[int, tuple[int, ...]] = field(default_factory=dict)


class ScriptedSampler(FakeSampler):
    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__()
        self.rest = iter(tokens)


class ScriptedBackend(FakeBackend):
    """Checks the engine's account of every row and computes none: agents' prompts are long."""

    def __init__(self, vocabulary: Vocabulary, settings: EngineSettings, script: Script) -> None:
        super().__init__(n_slots=settings.parallel, n_cells=settings.ctx_size)
        self.eog_tokens = vocabulary.eog_tokens
        self._script = script

    def new_sampler(
        self,
        sampling: Sampling,
        tokens: Sequence[int],
        n_reply: int,
        n_top_logprobs: int | None,
        *,
        n_left: int = 0,
        is_landing: bool = False,
        state: tuple[float, ...] = (),
    ) -> FakeSampler:
        assert sampling.seed is not None
        self._script.prompts[sampling.seed] = tuple(tokens)
        return ScriptedSampler(self._script.replies[sampling.seed])

    def sample(
        self, samplers: Sequence[FakeSampler], rows: Sequence[int]
    ) -> list[TokenSampled | Exception]:
        scripted = [sampler for sampler in samplers if isinstance(sampler, ScriptedSampler)]
        return [TokenSampled(next(sampler.rest)) for sampler in scripted]

    def sample_stored(self, sampler: FakeSampler, logits: Payload) -> TokenSampled | Exception:
        [sampled] = self.sample([sampler], [0])
        return sampled


class ScriptedServer:
    """The whole server without llama.cpp. Call `say` before each request with that `seed`."""

    def __init__(self, url: str, vocabulary: Vocabulary, script: Script) -> None:
        self.url = url
        self._vocabulary = vocabulary
        self._script = script

    def say(self, seed: int, text: str) -> tuple[int, ...]:
        """Without the token that ends the turn."""
        lines = (text[i : i + CUT_CHARACTERS] for i in range(0, len(text), CUT_CHARACTERS))
        tokens = [
            token
            for line in lines
            for token in self._vocabulary.tokenize(line, parse_special=False)
        ]
        end = self._vocabulary.tokenize(TURN_END, parse_special=True)
        self._script.replies[seed] = (*tokens, *end)
        return tuple(tokens)

    def prompt_of(self, seed: int) -> tuple[int, ...]:
        """Return the prompt as the engine received it."""
        return self._script.prompts[seed]

    def text_of(self, tokens: Sequence[int]) -> str:
        return self._vocabulary.detokenize(tokens, render_special=True).decode("utf-8", "replace")


@contextmanager
def serve_backend(
    model: Path,
    folder: Path,
    make_backend: Callable[[Vocabulary, EngineSettings], FakeBackend],
    *,
    template: str,
    n_cells: int,
    n_slots: int,
    name: str = "tiny",
    reasoning_history: ReasoningHistory = ReasoningHistory.AUTO,
) -> Iterator[tuple[str, Vocabulary]]:
    """Run a server in this process, without rewarm: that would hide the cost of requests.

    Yields its address and the vocabulary of `model`, from which nothing else is loaded.
    """
    settings = Settings(
        model=ModelSettings(chat_template=template),
        chat=ChatSettings(rewarm=False, reasoning_history=reasoning_history),
        engine=EngineSettings(ctx_size=n_cells, parallel=n_slots),
        cache=CacheSettings(cache_dir=folder, cache_write_budget=Bytes(0), cache_recompute=False),
    )
    vocabulary = VocabularyFile(model).vocabulary

    class BackendProcess(ThreadProcess):
        def __init__(self) -> None:
            super().__init__(Fate())

        def _load(self, order: Load, *, on_progress: Callable[[float], bool]) -> LoadedEngine:
            return loaded_engine(order, make_backend(vocabulary, order.engine), FakeEmbedder())

    with patch.object(loaded_model, "EngineProcess", BackendProcess):
        assembly = assemble(settings, ModelFile(model, name))
        with background(assembly) as url:
            yield url, vocabulary


@contextmanager
def serve_script(
    model: Path,
    folder: Path,
    *,
    template: str,
    n_cells: int,
    n_slots: int,
    reasoning_history: ReasoningHistory = ReasoningHistory.AUTO,
) -> Iterator[ScriptedServer]:
    script = Script()
    with serve_backend(
        model,
        folder,
        lambda vocabulary, settings: ScriptedBackend(vocabulary, settings, script),
        template=template,
        n_cells=n_cells,
        n_slots=n_slots,
        reasoning_history=reasoning_history,
    ) as (url, vocabulary):
        yield ScriptedServer(url, vocabulary, script)
