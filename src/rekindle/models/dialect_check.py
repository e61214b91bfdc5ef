"""Checks what a model's template makes of tool calls, without loading the weights."""

from dataclasses import dataclass
from pathlib import Path

from rekindle.chat.dialects.choice import DialectChoice
from rekindle.chat.reply.tool_use import GrammarProof, ToolUses
from rekindle.errors import StartupError
from rekindle.llama.grammar.compiler import GrammarCompiler
from rekindle.llama.model import VocabularyFile
from rekindle.models.chat_setup import template_source, with_dialect
from rekindle.models.files.gguf_check import check_gguf

JINJA = ".jinja"


@dataclass(frozen=True, slots=True)
class DialectReport:
    """What is known about the tool calls of one model or template."""

    template: str  # where it comes from
    choice: DialectChoice
    proof: GrammarProof | None  # None: there is no vocabulary to try the grammars with


def check_dialect(
    path: Path, *, chat_template: str | None = None, name: str | None = None
) -> DialectReport:
    """Check a GGUF file, or a template alone. Raises StartupError.

    `chat_template` and `name` are the operator's settings, as for a server.
    """
    if path.suffix == JINJA:
        if chat_template is not None:
            raise StartupError(f"{path} is a template: --chat-template is for a GGUF file.")
        read = with_dialect(template_source(str(path), None), None, name)
        return DialectReport(str(path), read.choice, None)
    check_gguf(path)
    file = VocabularyFile(path)
    try:
        source = template_source(chat_template, file.chat_template)
        read = with_dialect(source, file.vocabulary, name)
        check = GrammarCompiler(file.vocabulary).check
        uses = ToolUses(read.choice, file.vocabulary, check, finishes_calls=True)
        origin = chat_template or ("its own" if file.chat_template else "none: ChatML is used")
        return DialectReport(origin, read.choice, uses.prove())
    finally:
        file.close()
