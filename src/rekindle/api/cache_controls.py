"""Cache fields of a request, and the marks and cache terms that they make.

A mark is a place in the conversation up to which the client wants the prompt kept. Wire formats
name it differently.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Literal

from pydantic import Field

from rekindle.api.body import WireModel
from rekindle.api.http.caller import Caller, Hints
from rekindle.api.requests.json_values import Int64
from rekindle.api.requests.limits import MAX_ID_CHARS, Id
from rekindle.chat.conversation import Conversation, Role
from rekindle.chat.prompt.prompt import Prompt
from rekindle.generation.request import CacheTerms, Pin, Rank

TTL_SECONDS = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "24h": 86400.0}
OPENAI_TTL = "30m"  # default of a breakpoint
MAX_BREAKPOINTS = 4  # OpenAI's and Anthropic's limit
AUTO_KEY_BYTES = 8
SLOT_PREFIX = "slot:"  # of the names of llama-server's slots

CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]


class CommonFields(WireModel):
    """Fields of every wire format that generates. All but the first two are ours."""

    model: Id | None = None
    stream: bool | None = None
    cache_prompt: bool | None = None
    speculative: bool | None = None
    # llama-server's: the longest draft. Here drafts have the length that pays.
    speculative_n_max: Annotated[Int64, Field(ge=0)] | None = Field(
        default=None, alias="speculative.n_max"
    )
    prefill: bool | None = None
    cache_key: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/-]{1,128}$")] | None = None
    persist: bool | None = None
    cache_salt: CacheSalt | None = None
    cache_class: Literal["main", "background", "ephemeral"] | None = None
    # llama-server's. Prefixes are found in any slot, so the number is only a name of the prompt.
    id_slot: Int64 | None = None

    @property
    def session_names(self) -> tuple[str | None, ...]:
        """Names of the caller's session. The first that is not empty counts."""
        return ()

    @property
    def primes(self) -> bool:
        """Whether to evaluate and keep the prompt, and generate nothing."""
        return bool(self.prefill)

    @property
    def speculates(self) -> bool:
        """Whether tokens may be drafted. The server's setting can still forbid it."""
        if self.speculative is not None:
            return self.speculative
        return self.speculative_n_max is None or self.speculative_n_max > 0


class PromptCacheOptions(WireModel):
    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["5m", "30m", "1h", "24h"] | None = None
    prewarm: bool | None = None
    comparison_response_id: Id | None = None


class PromptCacheBreakpoint(WireModel):
    mode: Literal["explicit"] | None = None


class OpenAiFields(CommonFields):
    """Fields that chat completions, completions and Responses share."""

    user: Id | None = None
    prompt_cache_key: Id | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    @property
    def session_names(self) -> tuple[str | None, ...]:
        return (self.prompt_cache_key, self.user)

    @property
    def primes(self) -> bool:
        options = self.prompt_cache_options
        return bool(self.prefill or (options is not None and options.prewarm))


@dataclass(frozen=True, slots=True)
class Mark:
    n_messages: int | None  # before the mark; 0: system and tools only, None: the whole prompt
    seconds: float


def hints_of(body: CommonFields) -> Hints:
    return Hints(
        sessions=body.session_names,
        cache_class=body.cache_class,
        cache_salt=body.cache_salt,
    )


def openai_marks(body: OpenAiFields, breakpoints: Sequence[int]) -> tuple[Mark, ...]:
    """List the marks. `breakpoints`: the number of messages before each explicit one."""
    options = body.prompt_cache_options or PromptCacheOptions()
    seconds = TTL_SECONDS[options.ttl or OPENAI_TTL]
    marks = [Mark(n_messages, seconds) for n_messages in breakpoints]
    if options.ttl is not None and options.mode != "explicit":
        marks.append(Mark(None, seconds))
    if body.prompt_cache_retention == "24h":
        marks.append(Mark(None, TTL_SECONDS["24h"]))
    return tuple(marks[-MAX_BREAKPOINTS:])


def covered(conversation: Conversation, n_messages: int) -> int:
    """Return `Mark.n_messages`: 0 if only system messages are covered, which count as the head."""
    is_head = all(each.role is Role.SYSTEM for each in conversation.messages[:n_messages])
    return 0 if is_head else n_messages


def position_of(mark: Mark, prompt: Prompt) -> int:
    if mark.n_messages is None:
        return len(prompt.tokens)
    # Trimming may have dropped the oldest messages.
    return prompt.position_of(max(mark.n_messages - prompt.n_dropped, 0))


def pins_of(marks: Iterable[Mark], prompt: Prompt) -> tuple[Pin, ...]:
    """Return the fewest pins that keep what the marks ask for. A pin holds everything before it.

    Blocking, as `Prompt.position_of` is.
    """
    longest: dict[int | None, float] = {}  # one per place: finding a position is slow
    for mark in marks:
        longest[mark.n_messages] = max(mark.seconds, longest.get(mark.n_messages, 0))
    wanted = [(position_of(Mark(*each), prompt), each[1]) for each in longest.items()]
    pins: list[Pin] = []
    for n_tokens, seconds in sorted(wanted, reverse=True):
        if n_tokens > 0 and (not pins or seconds > pins[-1].seconds):
            pins.append(Pin(n_tokens, seconds))
    return tuple(reversed(pins))


def slot_name(id_slot: int) -> str:
    """Return the name of the last prompt that a client has sent with this slot."""
    return f"{SLOT_PREFIX}{id_slot}"


def auto_key(conversation: Conversation) -> str:
    """Name a prompt by its system messages and tools. The order of JSON keys does not matter."""
    systems = [message.text for message in conversation.messages if message.role is Role.SYSTEM]
    tools = [json.loads(tool.definition_json) for tool in conversation.tools]
    return _key_of({"system": systems, "tools": tools})


def terms_of(
    caller: Caller,
    body: CommonFields,
    marks: Iterable[Mark],
    conversation: Conversation | None,
    prompt: Prompt,
    *,
    primes: bool,
) -> CacheTerms:
    """Make the terms. `conversation`: None for raw text. `primes`: nothing is generated."""
    name = body.cache_key
    if name is None and body.id_slot is not None and body.id_slot >= 0:
        name = slot_name(body.id_slot)
    if name is None and primes:
        name = _key_of({"prompt": prompt.text}) if conversation is None else auto_key(conversation)
    return CacheTerms(
        namespace=caller.namespace,
        session=caller.session,
        rank=Rank.MAIN if caller.rank is None else caller.rank,
        pins=pins_of(marks, prompt),
        name=name,
        persist=bool(body.persist),
        asked_at=caller.asked_at,
    )


def _key_of(value: object) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return "auto-" + blake2b(canonical.encode(), digest_size=AUTO_KEY_BYTES).hexdigest()
