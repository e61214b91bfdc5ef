"""A model's template, dialect and prompts, from the settings: the same for every engine."""

from dataclasses import dataclass
from pathlib import Path

from rekindle.chat.dialects import choose
from rekindle.chat.dialects.base import Dialect
from rekindle.chat.prompt.prompt import PromptBuilder
from rekindle.chat.prompt.turn_memory import TurnMemory
from rekindle.chat.prompt.volatile import VolatileRules
from rekindle.chat.template.guard import Guard
from rekindle.chat.template.template import CHATML, ChatTemplate
from rekindle.config import Settings
from rekindle.errors import StartupError
from rekindle.generation.stored_turns import TurnStore
from rekindle.generation.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatSetup:
    template_source: str
    dialect: Dialect
    prompts: PromptBuilder


def set_up_chat(
    settings: Settings, tokenizer: Tokenizer, own_template: str | None, turns: TurnStore
) -> ChatSetup:
    """`own_template` is what came with the model. Raises StartupError."""
    source = _template_source(settings.model.chat_template, own_template)
    template = ChatTemplate(
        source,
        bos_text=tokenizer.bos_text,
        eos_text=tokenizer.eos_text,
        guard=Guard(tokenizer.special_strings),
    )
    dialect = choose(
        source,
        supports_tools=template.traits.tools and template.traits.calls,
        override=settings.chat.tool_dialect,
    )
    prompts = PromptBuilder(
        template,
        tokenizer,
        dialect,
        TurnMemory(turns),
        settings.chat.reasoning_history,
        volatile=VolatileRules(settings.chat.volatile),
    )
    return ChatSetup(source, dialect, prompts)


def _template_source(setting: str | None, own_template: str | None) -> str:
    """A path, Jinja text, or a built-in name; else the model's own; else ChatML."""
    if setting is None:
        return own_template or CHATML
    if setting == "chatml":
        return CHATML
    if "{%" in setting or "{{" in setting:
        return setting
    try:
        return Path(setting).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"The chat template {setting} cannot be read: {error}.") from error
