"""Prompts of one model without its weights: its vocabulary and its template."""

from collections.abc import Iterator
from contextlib import contextmanager

from rekindle.cache.turns.recent import MemoryTurns
from rekindle.chat.prompt.prompt import PromptBuilder
from rekindle.chat.prompt.turn_memory import TurnMemory
from rekindle.chat.prompt.volatile import VolatileRules
from rekindle.config.choices import ReasoningHistory
from rekindle.generation.forgetting import Tombstones
from rekindle.llama.model import VocabularyFile
from rekindle.models.chat_setup import template_source, with_dialect
from rekindle.models.files.embedded import embedded_source
from rekindle.models.source import resolve_model


@contextmanager
def prompt_reader(model: str | None, *, chat_template: str | None) -> Iterator[PromptBuilder]:
    """Yield a builder of prompts that remembers no turns. Raises StartupError.

    `model`: as for a server; None: the embedded one.
    """
    file = VocabularyFile(embedded_source() if model is None else resolve_model(model).path)
    try:
        source = template_source(chat_template, file.chat_template)
        read = with_dialect(source, file.vocabulary, None)
        yield PromptBuilder(
            read.template,
            file.vocabulary,
            read.choice.dialect,
            TurnMemory(MemoryTurns(Tombstones())),
            ReasoningHistory.AUTO,
            volatile=VolatileRules(()),
        )
    finally:
        file.close()
