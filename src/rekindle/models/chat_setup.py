"""The text side of a model, from the settings: template, dialect, prompts, responder."""

import json
import logging
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rekindle.chat.dialects.choice import DialectChoice, apply, choose
from rekindle.chat.prompt.prompt import PromptBuilder
from rekindle.chat.prompt.turn_memory import TurnMemory
from rekindle.chat.prompt.volatile import VolatileRules
from rekindle.chat.rerank import RerankFormat
from rekindle.chat.responder import Responder
from rekindle.chat.rewarm import Rewarmer
from rekindle.chat.template.guard import Guard
from rekindle.chat.template.template import CHATML, ChatTemplate
from rekindle.config.choices import ReasoningSwitch
from rekindle.config.model import ChatSettings
from rekindle.config.sampling import RANDOM_SEED, SamplingSettings
from rekindle.config.settings import Settings
from rekindle.errors import StartupError
from rekindle.generation.engine import Engine
from rekindle.generation.request import SamplerName, Sampling
from rekindle.generation.stored_turns import TurnStore
from rekindle.generation.tokenizer import Tokenizer
from rekindle.models.serving_model import ServerParts

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadTemplate:
    """A template, and the dialect that was found in it."""

    template: ChatTemplate
    choice: DialectChoice


def read_template(
    settings: Settings, model: str, own_template: str | None, tokenizer: Tokenizer
) -> ReadTemplate:
    """Compile the model's template and find its dialect: up to 0.3 s. Raises StartupError."""
    source = template_source(settings.model.chat_template, own_template)
    read = with_dialect(source, tokenizer, settings.chat.tool_dialect)
    _tell(model, read.choice)
    return read


def with_dialect(source: str, tokenizer: Tokenizer | None, name: str | None) -> ReadTemplate:
    """Compile the template, and find its dialect or take the one of that name.

    Raises StartupError. `tokenizer`: None if the model is not known.
    """
    template = ChatTemplate(
        source,
        bos_text=tokenizer.bos_text if tokenizer else "",
        eos_text=tokenizer.eos_text if tokenizer else "",
        guard=Guard(tokenizer.special_strings if tokenizer else ()),
    )
    with template.bounded():  # one deadline for all renderings of the search
        choice = choose(template, name=name)
    apply(choice, template)
    return ReadTemplate(template, choice)


def set_up_chat(
    parts: ServerParts,
    name: str,
    engine: Engine,
    tokenizer: Tokenizer,
    turns: TurnStore,
    *,
    read: ReadTemplate,
    default_sampling: Sampling,
    embedding_end_token: int | None,
    rerank_format: RerankFormat,
    can_rewarm: bool,
) -> Responder:
    """Build the responder of one model.

    `can_rewarm`: the engine has background requests, which yield to all others.
    """
    settings = parts.settings
    n_predict = settings.sampling.n_predict
    prompts = PromptBuilder(
        read.template,
        tokenizer,
        read.choice.dialect,
        TurnMemory(turns),
        settings.chat.reasoning_history,
        volatile=VolatileRules(settings.chat.volatile),
    )
    return Responder(
        engine,
        tokenizer,
        prompts,
        read.choice,
        sampling_with(default_sampling, settings.sampling),
        default_cache_prompt=settings.cache.cache_prompt,
        default_overflow=settings.chat.overflow,
        default_max_tokens=None if n_predict < 0 else n_predict,
        template_kwargs=template_kwargs_of(settings.chat),
        reasoning_limit=reasoning_limit_of(settings.chat),
        stream_calls=settings.chat.stream_calls,
        sticky_tools=settings.chat.sticky_tools,
        rewarmer=Rewarmer(engine, prompts) if can_rewarm and settings.chat.rewarm else None,
        embedding_end_token=embedding_end_token,
        rerank_format=rerank_format,
        batch_size=settings.engine.batch_size,
        model=name,
        accounts=parts.accounts,
        observers=parts.observers,
    )


def template_kwargs_of(chat: ChatSettings) -> dict[str, Any]:
    """Return the operator's arguments of the template."""
    switch = {"enable_thinking": True} if chat.reasoning is ReasoningSwitch.ON else {}
    given = chat.chat_template_kwargs
    return switch if given is None else {**switch, **json.loads(given)}


def reasoning_limit_of(chat: ChatSettings) -> int | None:
    """Return the most reasoning tokens of a reply; None: no limit. 0 turns the switch off too."""
    if chat.reasoning is ReasoningSwitch.OFF:
        return 0
    return None if chat.reasoning_budget < 0 else chat.reasoning_budget


def sampling_with(own: Sampling, settings: SamplingSettings) -> Sampling:
    """Return the model's own sampling with what the settings replace."""
    names = {each.name for each in fields(Sampling)}
    given = {
        each.name: value
        for each in fields(settings)
        if each.name in names and (value := getattr(settings, each.name)) not in (None, ())
    }
    if settings.samplers is not None:
        given["samplers"] = sampler_names(settings.samplers)
    if breakers := settings.dry_sequence_breakers:
        is_none = breakers == ("none",)
        given["dry_sequence_breakers"] = () if is_none else tuple(map(_unescaped, breakers))
    if given.get("seed") == RANDOM_SEED:
        given["seed"] = None
    return replace(own, **given)


def sampler_names(names: str) -> tuple[SamplerName, ...]:
    """Return the samplers of a list with semicolons. Raises StartupError."""
    by_name = {each.value.replace("_", ""): each for each in SamplerName}
    by_name["typicalp"] = SamplerName.TYPICAL_P
    found = []
    for name in names.split(";"):
        sampler = by_name.get(name.strip().lower().replace("-", "").replace("_", ""))
        if sampler is None:
            known = ", ".join(SamplerName)
            raise StartupError(f"samplers has an unknown name {name.strip()!r}; known are {known}.")
        found.append(sampler)
    return tuple(dict.fromkeys(found))


def _unescaped(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _tell(model: str, choice: DialectChoice) -> None:
    """Say how the model's calls are read, and what is lost."""
    level = logging.INFO if choice.was_expected else logging.WARNING
    lost = f"; {'; '.join(choice.losses)}" if choice.losses else ""
    _log.log(level, "model=%s tool calls: %s%s", model, choice.line, lost)


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
