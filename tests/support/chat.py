"""Chat objects with the arguments that most tests do not care about."""

from typing import Any

from rekindle.cache.turns.recent import MemoryTurns
from rekindle.chat.accounts.accounts import Account, Accounts
from rekindle.chat.accounts.recent_prompts import past_prompt
from rekindle.chat.accounts.request_log import log_request
from rekindle.chat.dialects.base import Dialect
from rekindle.chat.dialects.choice import chosen
from rekindle.chat.prompt.prompt import Prompt, PromptBuilder
from rekindle.chat.prompt.turn_memory import TurnMemory
from rekindle.chat.prompt.volatile import VolatileRules
from rekindle.chat.reply.assembler import NO_LIMITS, ReplyReader
from rekindle.chat.reply.events import LineLimits, ReplyOptions
from rekindle.chat.reply.stream import ReplyStream
from rekindle.chat.rerank import RerankFormat
from rekindle.chat.responder import Responder
from rekindle.chat.template.template import ChatTemplate
from rekindle.config.choices import Overflow, ReasoningHistory
from rekindle.generation.engine import Engine
from rekindle.generation.events import TokenStream
from rekindle.generation.forgetting import Tombstones
from rekindle.generation.request import CacheTerms, Sampling
from rekindle.generation.tokenizer import Tokenizer


def prompt_builder(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    dialect: Dialect,
    memory: TurnMemory | None = None,
    reasoning_history: ReasoningHistory = ReasoningHistory.AUTO,
) -> PromptBuilder:
    memory = memory or TurnMemory(MemoryTurns(Tombstones()))
    rules = VolatileRules(())
    return PromptBuilder(template, tokenizer, dialect, memory, reasoning_history, volatile=rules)


def chat_responder(
    engine: Engine,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    dialect: Dialect,
    *,
    model: str = "",
    accounts: Accounts | None = None,
    default_max_tokens: int | None = None,
    template_kwargs: dict[str, Any] | None = None,
    sticky_tools: bool = False,
) -> Responder:
    return Responder(
        engine,
        tokenizer,
        prompt_builder(template, tokenizer, dialect),
        chosen(dialect),
        Sampling(),
        default_cache_prompt=True,
        default_overflow=Overflow.ERROR,
        default_max_tokens=default_max_tokens,
        template_kwargs=template_kwargs or {},
        reasoning_limit=None,
        stream_calls=True,
        sticky_tools=sticky_tools,
        rewarmer=None,
        embedding_end_token=None,
        rerank_format=RerankFormat(),
        batch_size=2048,
        model=model,
        accounts=accounts or Accounts(Tombstones()),
        observers=(),
    )


def reply_stream(
    prompt: Prompt,
    tokens: TokenStream,
    tokenizer: Tokenizer,
    *,
    reader: ReplyReader | None = None,
    stop: tuple[str, ...] = (),
    line_limits: LineLimits = NO_LIMITS,
    shows_tokens: bool = False,
) -> ReplyStream:
    return ReplyStream(
        "id",
        prompt,
        tokens,
        tokenizer,
        stop=stop,
        line_limits=line_limits,
        shows_tokens=shows_tokens,
        reader=reader,
        is_remembered=True,
        on_end=None,
        account=account_of(prompt),
        observe=log_request,
    )


def account_of(prompt: Prompt, **options: Any) -> Account:
    asked = past_prompt(prompt, CacheTerms(), model="", reply_id=None)
    return Accounts(Tombstones()).open(
        asked, ReplyOptions(sampling=Sampling(), **options), str, can_store=True, n_ctx=512
    )
