"""One sentence of advice for each reason of a miss."""

from rekindle.explain.findings import MissGroup, VolatileSpan
from rekindle.observe.request_record import Miss, MissReason

_ADVICE = {
    MissReason.FIRST_REQUEST: "No earlier prompt begins like this one: `rekindle prime` can compute"
    " it ahead of time.",
    MissReason.EVICTED: "It was stored and evicted: give the cache more room with --cache-ram or"
    " --cache-disk.",
    MissReason.OTHER_MODEL: "Each model has its own cache: use one model for a conversation.",
    MissReason.TEXT_CHANGED: "An earlier message was changed: resend messages unchanged, and append"
    " new text at the end.",
    MissReason.TOOLS_CHANGED: "Tools are at the beginning of a prompt: always send the same ones,"
    " and limit their use with `tool_choice`.",
    MissReason.SYSTEM_CHANGED: "The system prompt was changed: keep it constant, and put changing"
    " text into the last message.",
    MissReason.TEMPLATE_REWROTE_TURN: "The model's template now renders an earlier turn"
    " differently: --reasoning-history keep may help.",
    MissReason.CACHE_OFF: "The cache was off: see `cache_prompt` in the request, and the start of"
    " the server log.",
    MissReason.RECOMPUTE_FASTER: "Computing it was faster than loading it: nothing is wrong.",
    MissReason.NO_CHECKPOINT: "This model resumes from checkpoints only, and there was none where"
    " this prompt diverges from an earlier one. There is one now.",
}


def advice_for(miss: Miss) -> str:
    return _ADVICE[miss.reason]


def advice_on(found: VolatileSpan | MissGroup) -> str:
    volatile, miss, cost = found.volatile, found.miss, found.cost
    if volatile is None or cost.n_times < 2:
        return advice_for(miss)
    near = f" near {volatile.near!r}" if volatile.near else ""
    return (
        f"The {place_of(miss)} holds a {volatile.kind}{near}: it cost"
        f" {cost.tokens_in_last_hour:,} tokens in the last hour; move it to the last message."
    )


def place_of(miss: Miss) -> str:
    """Name the place where the texts diverge."""
    if miss.reason is MissReason.TOOLS_CHANGED:
        return f"tool {miss.part}"
    if miss.message is None:
        return "prompt" if miss.expected or miss.got else ""
    if miss.reason is MissReason.SYSTEM_CHANGED:
        return "system prompt"
    part = "" if miss.part in (None, "text") else f", {(miss.part or '').replace('_', ' ')}"
    return f"message {miss.message}{part}"
