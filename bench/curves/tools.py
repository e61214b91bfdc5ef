"""Tools: a request is read, its prompt rendered and tokenised, and its grammar compiled.

Each repeat has tools of other names, so that nothing is remembered.
"""

import json
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import count
from typing import Any

from bench.curves.curve import (
    LINEAR,
    MILLISECONDS,
    Curve,
    Measured,
    cpu_milliseconds_after,
    curves_of,
)
from bench.prompt_building import AgentChat, begun, tool_of
from rekindle.api.openai.schema import ChatCompletionRequest
from rekindle.api.openai.tools import tools_of
from rekindle.cache.turns.recent import MemoryTurns
from rekindle.chat.conversation import Conversation, Tool
from rekindle.chat.dialects.syntax.lark import literals, usable_schemas
from rekindle.chat.prompt.canonical_tools import schemas_of
from rekindle.generation.forgetting import Tombstones
from rekindle.generation.request import Grammar, GrammarKind
from rekindle.llama.grammar.compiler import GrammarCompiler
from rekindle.llama.model import GgufModel
from rekindle.models.source import resolve_model

NAME = "tools"
ABOUT = "tools of a request"
SIZES = (1, 10, 100, 1_000)
QUICK_SIZES = (1, 10)
DESCRIPTION = "Does one thing to the file at this path, and says what it did. " * 3
READ, RENDER, WRITE = "read the request", "render and tokenise", "write the grammar"
COMPILE = "compile the grammar"
MEASURES = (
    Measured(READ, MILLISECONDS, LINEAR),
    Measured(RENDER, MILLISECONDS, LINEAR),
    Measured(WRITE, MILLISECONDS, LINEAR),
    Measured(COMPILE, MILLISECONDS, LINEAR),
)


def measure(sizes: Sequence[int]) -> list[Curve]:
    with closing(GgufModel(resolve_model(None).path, gpu_layers=0)) as model:
        compiler = GrammarCompiler(model.vocabulary)
        compiler.prepare()
        measured = _Tools(AgentChat(model.vocabulary), compiler)
        return curves_of(NAME, MEASURES, {n_tools: measured.values(n_tools) for n_tools in sizes})


class _Tools:
    def __init__(self, chat: AgentChat, compiler: GrammarCompiler) -> None:
        self._chat = chat
        self._compiler = compiler
        self._repeats = count()

    def values(self, n_tools: int) -> dict[str, float]:
        def new_tools() -> tuple[Tool, ...]:
            repeat = next(self._repeats)
            return tuple(tool_of(f"tool_{repeat}_{n}", DESCRIPTION) for n in range(n_tools))

        return {
            READ: cpu_milliseconds_after(lambda: _body(new_tools()), _read),
            RENDER: cpu_milliseconds_after(lambda: _conversation(new_tools()), self._render),
            WRITE: cpu_milliseconds_after(new_tools, self._grammar),
            # A large grammar is compiled on a thread with a large stack.
            COMPILE: cpu_milliseconds_after(
                lambda: self._grammar(new_tools()), self._compiler.matcher, time.process_time
            ),
        }

    def _render(self, conversation: Conversation) -> None:
        self._chat.builder(MemoryTurns(Tombstones())).from_conversation(conversation)

    def _grammar(self, tools: tuple[Tool, ...]) -> Grammar:
        schemas = usable_schemas(schemas_of(tools), lambda _schema: True)
        source = self._chat.dialect.grammar(schemas, parallel=True, literal=literals({}))
        return Grammar(GrammarKind.LARK, source)


def _conversation(tools: tuple[Tool, ...]) -> Conversation:
    return Conversation(begun().messages, tools)


def _body(tools: tuple[Tool, ...]) -> dict[str, Any]:
    definitions = [json.loads(tool.definition_json) for tool in tools]
    return {"messages": [{"role": "user", "content": "Hi"}], "tools": definitions}


def _read(body: dict[str, Any]) -> None:
    tools_of(ChatCompletionRequest.model_validate(body).tools or [])
