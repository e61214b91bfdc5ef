"""Conversations without a model: prompts are built, and invented replies come back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rekindle.cache.turns.recent import MemoryTurns
from rekindle.chat.conversation import Conversation, Message, Part, Reasoning, Role, Text, ToolCall
from rekindle.chat.dialects.choice import apply, choose
from rekindle.chat.prompt.canonical_tools import schemas_of
from rekindle.chat.prompt.prompt import Prompt, PromptBuilder
from rekindle.chat.prompt.turn_memory import TurnMemory
from rekindle.chat.reply.parser import ParsedReply, parse
from rekindle.chat.template.guard import Guard
from rekindle.chat.template.template import ChatTemplate
from rekindle.config.choices import ReasoningHistory
from rekindle.generation.forgetting import Tombstones
from rekindle.generation.request import USUAL_TERMS
from rekindle.generation.stored_turns import TurnStore
from rekindle.generation.tokenizer import Tokenizer
from tests.support.chat import prompt_builder


@dataclass(frozen=True)
class Exchange:
    """A reply as it was sampled, and as a client sends it back."""

    prompt: Prompt
    tokens: tuple[int, ...]
    said: ParsedReply
    message: Message

    @property
    def all_tokens(self) -> tuple[int, ...]:
        return self.prompt.tokens + self.tokens


class TurnBench:
    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        history: ReasoningHistory = ReasoningHistory.AUTO,
        store: TurnStore | None = None,
        end_text: str = "",
        dialect: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(
            source,
            bos_text=tokenizer.bos_text,
            eos_text=tokenizer.eos_text,
            guard=Guard(tokenizer.special_strings),
        )
        choice = choose(self.template, name=dialect)
        apply(choice, self.template)
        self.dialect = choice.dialect
        self.end_text = end_text or tokenizer.eos_text
        self.history = history
        self._n_calls = 0
        self.forget(store)

    def forget(self, store: TurnStore | None = None) -> None:
        """Restart with the turns of the store."""
        self.memory = TurnMemory(store or MemoryTurns(Tombstones()))
        self.prompts = self.builder(self.memory)

    def builder(self, memory: TurnMemory) -> PromptBuilder:
        return prompt_builder(self.template, self.tokenizer, self.dialect, memory, self.history)

    def plain(self, conversation: Conversation) -> tuple[int, ...]:
        """Return the prompt of a server that remembers no turn."""
        builder = self.builder(TurnMemory(MemoryTurns(Tombstones())))
        return builder.from_conversation(conversation).tokens

    def reply(
        self, conversation: Conversation, text: str, tokens: Sequence[int] | None = None
    ) -> Exchange:
        """Sample the reply as `tokens`, or as tokens that a tokeniser would not choose."""
        prompt = self.prompts.from_conversation(conversation)
        if tokens is None:
            tokens = odd_tokens(self.tokenizer, text)
        said = parse(
            self.dialect,
            schemas_of(conversation.tools) if conversation.tools else None,
            text,
            begins_in_reasoning=prompt.begins_in_reasoning,
        )
        ids = []
        for call in said.calls:
            self._n_calls += 1
            ids.append(call.id or f"call_{self._n_calls:04}")
        prompt.remember(tokens, self.end_text, said, ids, USUAL_TERMS.owner)
        return Exchange(prompt, tuple(tokens), said, message_of(said, ids))


def message_of(said: ParsedReply, ids: Sequence[str], *, with_reasoning: bool = False) -> Message:
    parts: list[Part] = []
    if with_reasoning and said.reasoning:
        parts.append(Reasoning(said.reasoning))
    if said.text:
        parts.append(Text(said.text))
    parts += [
        ToolCall(call_id, call.name, call.arguments_json)
        for call_id, call in zip(ids, said.calls, strict=True)
    ]
    return Message(Role.ASSISTANT, tuple(parts))


def extended(conversation: Conversation, *messages: Message) -> Conversation:
    return replace(conversation, messages=(*conversation.messages, *messages))


def odd_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Control strings are their tokens; the rest is cut into other tokens than a tokeniser's."""
    tokens: list[int] = []
    for token in tokenizer.tokenize(text, parse_special=True):
        piece = tokenizer.piece(token).decode("utf-8", "replace")
        if len(piece) > 1 and "\ufffd" not in piece:
            for part in (piece[:1], piece[1:]):
                tokens += tokenizer.tokenize(part, parse_special=False)
        else:
            tokens.append(token)
    return tokens


def cut_tokens(tokenizer: Tokenizer, text: str, cuts: Sequence[int]) -> list[int]:
    """Plain text, no token of which spans a cut."""
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [
        token
        for start, stop in pairwise(edges)
        for token in tokenizer.tokenize(text[start:stop], parse_special=False)
    ]


class SpacedTokenizer:
    """Puts a space in front of every text, as vocabularies of SentencePiece do."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        return self._tokenizer.tokenize(f" {text}", parse_special=parse_special)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
