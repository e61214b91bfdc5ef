"""Why a prompt missed the cache: what changed since the most similar earlier prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from rekindle.chat.accounts.recent_prompts import PastPrompt, n_shared
from rekindle.chat.accounts.seen_prefixes import GRAIN
from rekindle.chat.conversation import Conversation, Message, Role, Tool, ToolCall
from rekindle.chat.prompt.meaning import canonical_json
from rekindle.common_prefix import n_common
from rekindle.observe.request_record import Miss, MissReason

BEFORE_CHARACTERS, SHOWN_CHARACTERS = 24, 80
SHOWN_TOKENS = 64  # nearly always enough for SHOWN_CHARACTERS; picked

TextOf = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    miss: Miss | None = None
    is_compared: bool = True  # False: the client named a reply that is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOutcome:
    """How much of a prompt was found in the cache."""

    n_cached: int
    n_known: int  # tokens of the prompt that were computed earlier
    n_refused: int = 0  # stored, but recomputing them was faster
    n_missing_checkpoint_tokens: int = 0  # stored, but without a checkpoint to resume from
    uses_cache: bool = True  # False: the client switched it off
    can_store: bool = True  # False: this model cannot be cached


def explain(
    now: PastPrompt,
    earlier: PastPrompt | None,
    found: CacheOutcome,
    text_of: TextOf,
) -> Miss | None:
    """Return why no more of the prompt was cached; None: there is nothing to explain."""
    # The last token of a prompt may be computed for its logits.
    n_gone = max(
        min(found.n_known, len(now.tokens) - 1) - found.n_cached,
        found.n_refused,
        found.n_missing_checkpoint_tokens,
    )
    if found.n_cached == len(now.tokens):
        return None
    if not found.uses_cache:
        return Miss(reason=MissReason.CACHE_OFF, tokens_lost=n_gone)
    change, n_lost = None, 0
    if earlier is not None:
        n_lost = min(len(earlier.tokens), len(now.tokens) - 1) - found.n_cached
        change = _change(now, earlier, text_of) if n_lost >= GRAIN else None
    if n_gone >= GRAIN and (change is None or n_lost < 2 * n_gone):
        return Miss(reason=_gone_because(found, n_gone), tokens_lost=n_gone)
    if change is not None:
        return replace(change, tokens_lost=n_lost)
    is_new = earlier is None or earlier.model != now.model
    if is_new and max(found.n_known, found.n_cached) < GRAIN:
        return Miss(reason=MissReason.FIRST_REQUEST)
    return None


def _gone_because(found: CacheOutcome, n_gone: int) -> MissReason:
    if found.n_refused:
        return MissReason.RECOMPUTE_FASTER
    if 2 * found.n_missing_checkpoint_tokens >= n_gone:
        return MissReason.NO_CHECKPOINT
    return MissReason.EVICTED if found.can_store else MissReason.CACHE_OFF


def _change(now: PastPrompt, earlier: PastPrompt, text_of: TextOf) -> Miss | None:
    """Return what changed. The caller knows how many tokens it cost."""
    shared = n_shared(now.tokens, earlier.tokens)
    is_same_model = now.model == earlier.model
    if now.conversation is None or earlier.conversation is None:
        return _raw_change(now, earlier, shared, text_of) if is_same_model else None
    place = _first_change(earlier.conversation.messages, now.conversation.messages)
    if place is not None and _is_new_branch(now.conversation.messages, place):
        return None
    if not is_same_model:
        return Miss(reason=MissReason.OTHER_MODEL, expected=earlier.model, got=now.model)
    tools = _tools_changed(earlier.conversation.tools, now.conversation.tools)
    if tools is not None:
        return tools
    if place is not None:
        return _message_changed(earlier.conversation, now.conversation, place)
    if shared + GRAIN > len(earlier.tokens):
        return None
    texts = _token_texts(now, earlier, shared, text_of)
    return _difference(MissReason.TEMPLATE_REWROTE_TURN, *texts, message=_turn_at(now, earlier))


def _raw_change(now: PastPrompt, earlier: PastPrompt, shared: int, text_of: TextOf) -> Miss | None:
    """Return an edit if the end of the earlier prompt occurs again.

    Otherwise the prompts only share a beginning, and None is returned.
    """
    stop = earlier.n_prompt if shared < earlier.n_prompt else len(earlier.tokens)
    ending = earlier.tokens[max(shared, stop - GRAIN) : stop]
    if len(ending) < GRAIN or now.tokens[shared:].tobytes().find(ending.tobytes()) < 0:
        return None
    texts = _token_texts(now, earlier, shared, text_of)
    return _difference(MissReason.TEXT_CHANGED, *texts, part="text")


def _is_new_branch(messages: Sequence[Message], place: int) -> bool:
    """Return whether a new question follows the same history. That does not edit the history."""
    if messages[place].role is Role.SYSTEM:
        return False
    if place == len(messages) - 1:
        return True
    users = [i for i, message in enumerate(messages) if message.role is Role.USER]
    is_answered = any(message.role is Role.ASSISTANT for message in messages[place:])
    return place in users[:1] and not is_answered


def _tools_changed(before: Sequence[Tool], now: Sequence[Tool]) -> Miss | None:
    for old, new in zip_longest(before, now):
        expected, got = (_definition(old), _definition(new))
        if expected != got:
            tool = old or new
            return _difference(MissReason.TOOLS_CHANGED, expected, got, part=tool.name)
    return None


def _definition(tool: Tool | None) -> str:
    return canonical_json(tool.definition_json) if tool else ""


def _first_change(before: Sequence[Message], now: Sequence[Message]) -> int | None:
    """Return the index of the first message that changed in meaning, or else in spelling.

    Messages that were added or dropped at the end do not count as a change.
    """
    pairs = list(zip(before, now, strict=False))
    for spelled in (str.strip, str):
        for index, (old, new) in enumerate(pairs):
            if old.role is not new.role or _changed_part(old, new, spelled) is not None:
                return index
    return None


def _message_changed(before: Conversation, now: Conversation, place: int) -> Miss:
    old, new = before.messages[place], now.messages[place]
    changed = _changed_part(old, new, str.strip) or _changed_part(old, new, str)
    part, expected, got = changed or (None, old.text, new.text)
    is_system = Role.SYSTEM in (old.role, new.role)
    reason = MissReason.SYSTEM_CHANGED if is_system else MissReason.TEXT_CHANGED
    return _difference(reason, expected, got, message=place, part=part)


def _changed_part(
    old: Message, new: Message, spelled: Callable[[str], str]
) -> tuple[str, str, str] | None:
    """Return the kind of part that changed, and both texts.

    Missing reasoning does not count: many clients drop it from every turn.
    """
    if spelled(old.text) != spelled(new.text):
        return "text", old.text, new.text
    for call, other_call in zip_longest(old.calls, new.calls):
        one, other = _called(call, other_call), _called(other_call, call)
        if one != other:
            return "tool_call", one, other
    results = ([result.text for result in message.results] for message in (old, new))
    for one, other in zip_longest(*results, fillvalue=""):
        if spelled(one) != spelled(other):
            return "tool_result", one, other
    if new.reasoning and spelled(old.reasoning) != spelled(new.reasoning):
        return "reasoning", old.reasoning, new.reasoning
    return None


def _called(call: ToolCall | None, other: ToolCall | None) -> str:
    """Return a call as text. Arguments are parsed only if they differ: they can be whole files."""
    if call is None:
        return ""
    arguments = call.arguments_json
    if other is None or other.arguments_json != arguments:
        arguments = canonical_json(arguments)
    return f"{call.name} {arguments}"


def _turn_at(now: PastPrompt, earlier: PastPrompt) -> int | None:
    """Return the message where the rendered texts diverge, or the reply of the earlier prompt."""
    assert now.conversation is not None
    end = n_common(now.text, earlier.text)
    if end == len(earlier.text):
        return len(earlier.digests) - 1
    position = 0
    for index, message in enumerate(now.conversation.messages):
        text = message.text.strip()
        place = now.text.find(text, position)
        if place < 0:
            return None  # the template changed the text, so its place is unknown
        position = place + len(text)
        if position > end:
            return index
    return None


def _token_texts(
    now: PastPrompt, earlier: PastPrompt, shared: int, text_of: TextOf
) -> tuple[str, str]:
    """Return both texts around the first token that differs, with some text before it."""
    start = max(shared - BEFORE_CHARACTERS, 0)
    old, new = (each.tokens[start : shared + SHOWN_TOKENS].tolist() for each in (earlier, now))
    return text_of(old), text_of(new)


def _difference(
    reason: MissReason,
    expected: str,
    got: str,
    *,
    message: int | None = None,
    part: str | None = None,
) -> Miss:
    """Return a miss with both texts cut around their first difference."""
    place = n_common(expected, got)
    return Miss(
        reason=reason,
        message=message,
        part=part,
        before=expected[max(place - BEFORE_CHARACTERS, 0) : place],
        expected=expected[place : place + SHOWN_CHARACTERS],
        got=got[place : place + SHOWN_CHARACTERS],
    )
