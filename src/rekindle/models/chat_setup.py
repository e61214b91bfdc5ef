"""The text side of a model, from the settings: template, dialect, prompts, responder."""

from pathlib import Path

from rekindle.chat.dialects import choose
from rekindle.chat.prompt.prompt import PromptBuilder
from rekindle.chat.prompt.turn_memory import TurnMemory
from rekindle.chat.prompt.volatile import VolatileRules
from rekindle.chat.responder import Responder
from rekindle.chat.rewarm import Rewarmer
from rekindle.chat.template.guard import Guard
from rekindle.chat.template.template import CHATML, ChatTemplate
from rekindle.errors import StartupError
from rekindle.generation.engine import Engine
from rekindle.generation.request import Sampling
from rekindle.generation.stored_turns import TurnStore
from rekindle.generation.tokenizer import Tokenizer
from rekindle.models.serving_model import ServerParts


def set_up_chat(
    parts: ServerParts,
    name: str,
    engine: Engine,
    tokenizer: Tokenizer,
    turns: TurnStore,
    *,
    template: str,
    default_sampling: Sampling,
    embedding_end_token: int | None,
    can_rewarm: bool,
) -> Responder:
    """Build the responder of one model. `template` is Jinja text. Raises StartupError.

    `can_rewarm`: the engine has background requests, which yield to all others.
    """
    settings = parts.settings
    chat_template = ChatTemplate(
        template,
        bos_text=tokenizer.bos_text,
        eos_text=tokenizer.eos_text,
        guard=Guard(tokenizer.special_strings),
    )
    dialect = choose(
        template,
        supports_tools=chat_template.traits.tools and chat_template.traits.calls,
        override=settings.chat.tool_dialect,
    )
    prompts = PromptBuilder(
        chat_template,
        tokenizer,
        dialect,
        TurnMemory(turns),
        settings.chat.reasoning_history,
        volatile=VolatileRules(settings.chat.volatile),
    )
    return Responder(
        engine,
        tokenizer,
        prompts,
        dialect,
        default_sampling,
        default_cache_prompt=settings.cache.cache_prompt,
        default_overflow=settings.chat.overflow,
        rewarmer=Rewarmer(engine, prompts) if can_rewarm and settings.chat.rewarm else None,
        embedding_end_token=embedding_end_token,
        model=name,
        accounts=parts.accounts,
        observers=parts.observers,
    )


def template_source(setting: str | None, own_template: str | None) -> str:
    """Return the Jinja text of the setting, else of the model, else ChatML.

    The setting is a path, Jinja text, or the built-in name `chatml`.
    """
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
