"""Who can avoid each kind of fault, and how."""

from rekindle.lint.faults import FaultKind

CLIENT, TEMPLATE = "client", "template"

MEANINGS = {
    FaultKind.CLOCK: "a date or a time that changes from request to request",
    FaultKind.COUNTER: "a number that changes from request to request",
    FaultKind.ID: "an id or a hash that changes from request to request",
    FaultKind.STATE: "the state of a repository that changes, such as `git status`",
    FaultKind.ORDER: "the same tools, messages or arguments in another order",
    FaultKind.TOOLS: "tools that were dropped, added or changed",
    FaultKind.SYSTEM: "a rewritten system prompt",
    FaultKind.HISTORY: "an earlier message that was rewritten, dropped or inserted",
    FaultKind.SESSION: "text of one conversation in front of text that conversations share",
    FaultKind.TEMPLATE: "the template renders the same turns differently",
}

_ADVICE = {
    FaultKind.CLOCK: "Move it to the last message, or send the time of the first request again.",
    FaultKind.COUNTER: "Move it to the last message, or leave it out.",
    FaultKind.ID: "Move it to the last message, or send it in a header.",
    FaultKind.STATE: "Read it once per conversation, or let a tool return it.",
    FaultKind.ORDER: "Sort tools once, and send earlier messages and arguments as they were.",
    FaultKind.TOOLS: "Send the same tools in every request, and limit their use with"
    " `tool_choice`.",
    FaultKind.SYSTEM: "Keep the system prompt constant, and append changing text to the last"
    " message.",
    FaultKind.HISTORY: "Send earlier messages as they were, and append new text at the end.",
    FaultKind.SESSION: "Move it behind the text that all conversations share, such as tools.",
    FaultKind.TEMPLATE: "Nothing in the client's text: a server can keep reasoning with"
    " --reasoning-history keep.",
}


def advice_on(kind: FaultKind) -> str:
    return _ADVICE[kind]


def culprit_of(kind: FaultKind) -> str:
    return TEMPLATE if kind is FaultKind.TEMPLATE else CLIENT
