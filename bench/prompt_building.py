"""Measure the building of prompts with a long history: turn 1 against turn 100.

    python -m bench.prompt_building [--quick]

A tool loop of an agent, rendered with a template like Qwen's and tokenised with the embedded
model's vocabulary. Nothing is decoded. Each turn is built by a server that has built the earlier
ones. The last turn is also built after a restart, and without any remembered turn.
"""

import json
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

from bench.engine_run import timed
from bench.report import BenchRow, run_alone
from rekindle.cache.turns.database import TurnDatabase
from rekindle.cache.turns.recent import MemoryTurns
from rekindle.chat.conversation import (
    Conversation,
    Message,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolResult,
)
from rekindle.chat.dialects.choice import choose
from rekindle.chat.prompt.canonical_tools import schemas_of
from rekindle.chat.prompt.prompt import Prompt, PromptBuilder
from rekindle.chat.prompt.turn_memory import TurnMemory
from rekindle.chat.prompt.volatile import VolatileRules
from rekindle.chat.reply.parser import parse
from rekindle.chat.template.guard import Guard
from rekindle.chat.template.template import ChatTemplate
from rekindle.config.choices import ReasoningHistory
from rekindle.generation.forgetting import Tombstones
from rekindle.generation.request import USUAL_TERMS
from rekindle.generation.stored_turns import TurnStore
from rekindle.llama.model import GgufModel
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from rekindle.models.source import resolve_model

NAME = "prompt_building"
N_TURNS = 100
QUICK_TURNS = 10
TOKENS_PER_TURN = 1000
N_REPEATS = 5
SHOWN_TURNS = (1, 10, 25, 50, 100)

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + (m.role if m.role != 'tool' else 'user') + '\\n' }}
{%- if m.role == 'tool' %}{{- '<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else %}{{- m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": '
    + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
NAMES = ("read", "write", "search", "run", "list", "move", "look", "test")


def tool_of(name: str, description: str) -> Tool:
    function = {"name": name, "description": description, "parameters": PARAMETERS}
    return Tool(name, json.dumps({"type": "function", "function": function}))


TOOLS = tuple(tool_of(name, f"Tool to {name} things. " * 20) for name in NAMES)
WORDS = "the server keeps every prefix that it has computed and looks it up by its tokens "


def main(*, quick: bool = False) -> list[BenchRow]:
    n_turns = QUICK_TURNS if quick else N_TURNS
    rows: list[BenchRow] = []
    model = GgufModel(resolve_model(None).path, gpu_layers=0)
    chat = AgentChat(model.vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        store = TurnDatabase(Path(folder), fingerprint=b"b" * 16, forgotten=Tombstones())
        prompts = chat.builder(store)
        conversation = begun()
        for turn in range(1, n_turns + 1):
            # Only the first build of a turn counts: later ones have nothing new.
            prompt, build_seconds = timed(partial(prompts.from_conversation, conversation))
            call, remember_seconds = chat.sampled(prompt, turn)
            if turn in SHOWN_TURNS or turn == n_turns:
                rows += _rows(f"turn {turn}", prompt, build_seconds)
                rows.append(
                    BenchRow(NAME, f"turn {turn}", "to_remember_ms", remember_seconds * 1e3)
                )
            last = conversation
            conversation = answered(conversation, call, turn, TOKENS_PER_TURN)
        store.close()
        store = TurnDatabase(Path(folder), fingerprint=b"b" * 16, forgotten=Tombstones())
        for name, fresh in (
            ("after a restart", store),
            ("nothing remembered", MemoryTurns(Tombstones())),
        ):
            prompt, seconds = timed(partial(chat.builder(fresh).from_conversation, last))
            rows += _rows(name, prompt, seconds)
        again = [timed(lambda: prompts.from_conversation(last))[1] for _ in range(N_REPEATS)]
        rows += _rows("once more", prompts.from_conversation(last), median(again))
        store.close()
    model.close()
    return rows


class AgentChat:
    """Builds the prompts of agents, and makes their replies."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._template = ChatTemplate(
            TEMPLATE,
            bos_text=vocabulary.bos_text,
            eos_text=vocabulary.eos_text,
            guard=Guard(vocabulary.special_strings),
        )
        self.dialect = choose(self._template).dialect

    def builder(self, store: TurnStore) -> PromptBuilder:
        return PromptBuilder(
            self._template,
            self.vocabulary,
            self.dialect,
            TurnMemory(store),
            ReasoningHistory.AUTO,
            volatile=VolatileRules(()),
        )

    def sampled(self, prompt: Prompt, turn: int) -> tuple[ToolCall, float]:
        """Return a reply, and how long it took to remember it."""
        name = TOOLS[turn % len(TOOLS)].name
        arguments = json.dumps({"path": f"src/file_{turn}.py"})
        text = f'I look.\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        tokens = self.vocabulary.tokenize(text, parse_special=True)
        said = parse(self.dialect, schemas_of(TOOLS), text, begins_in_reasoning=False)
        call_id = f"call_{turn}"
        owner = USUAL_TERMS.owner
        _, seconds = timed(lambda: prompt.remember(tokens, "<|im_end|>", said, [call_id], owner))
        return ToolCall(call_id, name, json.dumps(json.loads(arguments), indent=1)), seconds


def _rows(case: str, prompt: Prompt, seconds: float) -> list[BenchRow]:
    return [
        BenchRow(NAME, case, "tokens", len(prompt.tokens)),
        BenchRow(NAME, case, "remembered_turns", len(prompt.remembered)),
        BenchRow(NAME, case, "to_build_ms", seconds * 1e3),
    ]


def begun() -> Conversation:
    system = Message(Role.SYSTEM, (Text(WORDS * 100),))
    return Conversation((system, Message(Role.USER, (Text("Find the bug."),))), TOOLS)


def answered(conversation: Conversation, call: ToolCall, turn: int, n_tokens: int) -> Conversation:
    result = f"{turn}: " + WORDS * (n_tokens // 16)
    messages = (
        *conversation.messages,
        Message(Role.ASSISTANT, (Text("I look."), call)),
        Message(Role.TOOL, (ToolResult(call.id, call.name, result),)),
    )
    return Conversation(messages, conversation.tools)


if __name__ == "__main__":
    run_alone(main)
