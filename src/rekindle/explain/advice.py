"""What to do about a miss, in a sentence."""

from rekindle.explain.findings import Cost, MissGroup, VolatileSpan
from rekindle.explain.volatile import Volatile
from rekindle.observe.request_record import Miss, MissReason

_ADVICE = {
    MissReason.FIRST_REQUEST: "Nothing like it was computed before: `rekindle prime` can do that"
    " ahead of time.",
    MissReason.EVICTED: "It was stored and has gone since: give the cache more room with"
    " --cache-ram or --cache-disk.",
    MissReason.OTHER_MODEL: "Each model has rows of its own: stay with one for a conversation.",
    MissReason.TEXT_CHANGED: "An earlier message was changed: leave what was sent as it is, and add"
    " what is new at the end.",
    MissReason.TOOLS_CHANGED: "Tools stand at the beginning of a prompt: send the same ones all the"
    " time, and let `tool_choice` say which may be used.",
    MissReason.SYSTEM_CHANGED: "The system prompt was changed: keep it as it is, and put what"
    " changes into the last message.",
    MissReason.TEMPLATE_REWROTE_TURN: "The model's template shows an earlier turn in another way"
    " now: --reasoning-history keep may help.",
    MissReason.CACHE_OFF: "The cache was off: see `cache_prompt` in the request, and what the"
    " server says at its start.",
    MissReason.RECOMPUTE_FASTER: "To compute it was faster than to load it: nothing is wrong.",
    MissReason.NO_CHECKPOINT: "This model goes on from kept states only, and there was none where"
    " this prompt leaves an earlier one. One is kept there now.",
}


def advice_for(miss: Miss) -> str:
    return _ADVICE[miss.reason]


def advice_on(span: VolatileSpan) -> str:
    return _on_volatile(span.volatile, span.miss, span.cost)


def advice_in(group: MissGroup) -> str:
    if group.volatile is None or group.cost.n_times < 2:
        return advice_for(group.miss)
    return _on_volatile(group.volatile, group.miss, group.cost)


def place_of(miss: Miss) -> str:
    """Where the texts part, in words."""
    if miss.reason is MissReason.TOOLS_CHANGED:
        return f"tool {miss.part}"
    if miss.message is None:
        return "prompt" if miss.expected or miss.got else ""
    if miss.reason is MissReason.SYSTEM_CHANGED:
        return "system prompt"
    part = "" if miss.part in (None, "text") else f", {(miss.part or '').replace('_', ' ')}"
    return f"message {miss.message}{part}"


def _on_volatile(volatile: Volatile, miss: Miss, cost: Cost) -> str:
    near = f" near {volatile.near!r}" if volatile.near else ""
    return (
        f"The {place_of(miss)} holds a {volatile.kind}{near}: it cost"
        f" {cost.tokens_in_last_hour:,} tokens in the last hour; move it to the last message."
    )
