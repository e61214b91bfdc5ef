"""Name what changed between a prompt and the earlier prompt that it continues."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import zip_longest

from rekindle.chat.conversation import Conversation, Message, Role, Tool, ToolCall
from rekindle.chat.prompt.meaning import canonical_json
from rekindle.common_prefix import n_common
from rekindle.explain.volatile import volatile_of
from rekindle.lint.predecessors import SentPrompt, is_elsewhere
from rekindle.observe.request_record import Miss, MissReason

BEFORE_CHARACTERS, SHOWN_CHARACTERS = 24, 80


class FaultKind(StrEnum):
    CLOCK = "clock"
    COUNTER = "counter"
    ID = "id"
    STATE = "state"
    ORDER = "order"
    TOOLS = "tools"
    SYSTEM = "system"
    HISTORY = "history"
    SESSION = "session"
    TEMPLATE = "template"


_KINDS_OF_VOLATILE = {
    "clock": FaultKind.CLOCK,
    "date": FaultKind.CLOCK,
    "counter": FaultKind.COUNTER,
    "uuid": FaultKind.ID,
    "hash": FaultKind.ID,
    "git status": FaultKind.STATE,
}


# In another conversation, these are no rewritten text but text that differs there.
_KINDS_OF_REWRITING = (FaultKind.TOOLS, FaultKind.SYSTEM, FaultKind.HISTORY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The first difference of two prompts that costs tokens."""

    kind: FaultKind
    where: str  # tools, tool NAME, system prompt, message N, prompt
    what: str  # what happened there, in a few words
    before: str = ""  # the text in front of the difference
    expected: str = ""
    got: str = ""


@dataclass(frozen=True, slots=True)
class _Texts:
    """Two texts that differ, and where they stand."""

    earlier: str
    now: str
    where: str

    def change(self, kind: FaultKind, what: str) -> Change:
        """Return the change; a clock, a counter or an id in the texts decides its kind."""
        change = self.difference(kind, what)
        found = volatile_of(
            Miss(
                reason=MissReason.TEXT_CHANGED,
                before=change.before,
                expected=change.expected,
                got=change.got,
            )
        )
        if found is None:
            return change
        near = f" near {found.near!r}" if found.near else ""
        kind, what = _KINDS_OF_VOLATILE[found.kind], f"{found.kind}{near} changed"
        return replace(change, kind=kind, what=what)

    def difference(self, kind: FaultKind, what: str) -> Change:
        """Return the change of this kind, with both texts cut around their first difference."""
        place = n_common(self.earlier, self.now)
        return Change(
            kind=kind,
            where=self.where,
            what=what,
            before=self.earlier[max(place - BEFORE_CHARACTERS, 0) : place],
            expected=self.earlier[place : place + SHOWN_CHARACTERS],
            got=self.now[place : place + SHOWN_CHARACTERS],
        )


def change_between(earlier: SentPrompt, now: SentPrompt, n_shared: int) -> Change:
    """Return what changed. `n_shared`: tokens of the common prefix."""
    change = _change(earlier, now, n_shared)
    is_rewriting = change.kind in _KINDS_OF_REWRITING and bool(change.expected or change.got)
    if not is_rewriting or _is_same_conversation(earlier, now):
        return change
    what = "text that differs between conversations"
    return replace(change, kind=FaultKind.SESSION, what=what)


def _change(earlier: SentPrompt, now: SentPrompt, n_shared: int) -> Change:
    one, other = earlier.prompt.conversation, now.prompt.conversation
    if one is None or other is None:
        texts = _Texts(earlier.prompt.text, now.prompt.text, "prompt")
        return texts.change(FaultKind.HISTORY, "text changed")
    tools = _tools_changed(one.tools, other.tools)
    places = list(_changed_messages(one.messages, other.messages))
    if tools is not None:
        is_in_message = bool(places) and _diverges_in_message(earlier, now, places[0])
        return _message_changed(one, other, places[0]) if is_in_message else tools
    for place in places:
        end = now.prompt.locate(place + 1)
        # A difference before the place where the tokens diverge is not rendered.
        if end is None or end > n_shared:
            return _message_changed(one, other, place)
    if one.template_kwargs != other.template_kwargs:
        texts = _Texts(str(one.template_kwargs), str(other.template_kwargs), "template arguments")
        return texts.difference(FaultKind.SYSTEM, "template arguments changed")
    texts = _Texts(earlier.prompt.text, now.prompt.text, "prompt")
    return texts.difference(FaultKind.TEMPLATE, "the template renders the same turns differently")


def _diverges_in_message(earlier: SentPrompt, now: SentPrompt, place: int) -> bool:
    """Return whether the prompts diverge where the texts of this message do.

    Some templates render the tools behind the system prompt.
    """
    texts = []
    for sent in (earlier, now):
        messages = sent.prompt.conversation.messages if sent.prompt.conversation else ()
        texts.append(messages[place].text.strip() if place < len(messages) else "")
    start = n_common(earlier.prompt.text, now.prompt.text) - n_common(*texts)
    return start >= 0 and all(
        text and sent.prompt.text.startswith(text, start)
        for sent, text in zip((earlier, now), texts, strict=True)
    )


def _tools_changed(before: Sequence[Tool], now: Sequence[Tool]) -> Change | None:
    pairs = zip_longest(before, now)
    differing = [(old, new) for old, new in pairs if _definition(old) != _definition(new)]
    if not differing:
        return None
    old, new = differing[0]
    old_names, new_names = ([tool.name for tool in tools] for tools in (before, now))
    if old is not None and new is not None and old.name == new.name:
        texts = _Texts(old.definition_json, new.definition_json, f"tool {old.name}")
        return texts.change(FaultKind.TOOLS, "definition changed")
    if Counter(old_names) == Counter(new_names):
        shown = (", ".join(names)[:SHOWN_CHARACTERS] for names in (old_names, new_names))
        expected, got = shown
        what = "tools changed places"
        return Change(kind=FaultKind.ORDER, where="tools", what=what, expected=expected, got=got)
    gone, come = Counter(old_names) - Counter(new_names), Counter(new_names) - Counter(old_names)
    said = [
        f"{verb} {', '.join(sorted(names))}"
        for verb, names in (("dropped", gone), ("added", come))
        if names
    ]
    if not now:
        said = ["all dropped"]
    return Change(kind=FaultKind.TOOLS, where="tools", what="; ".join(said))


def _definition(tool: Tool | None) -> str:
    return tool.definition_json if tool else ""


def _changed_messages(before: Sequence[Message], now: Sequence[Message]) -> Iterator[int]:
    """Yield the messages that differ, up to the end of the shorter conversation."""
    for index, (old, new) in enumerate(zip(before, now, strict=False)):
        if _key(old) != _key(new):
            yield index
    if len(now) < len(before):
        yield len(now)


def _key(message: Message) -> tuple[object, ...]:
    """Return what a template may render of a message. Ids of calls are left out."""
    calls = [(call.name, call.arguments_json) for call in message.calls]
    results = [result.text for result in message.results]
    return message.role, message.text, calls, results, message.reasoning


def _message_changed(before: Conversation, now: Conversation, place: int) -> Change:
    if place >= len(now.messages):
        what = "messages at the end dropped"
        return Change(kind=FaultKind.HISTORY, where=f"message {place}", what=what)
    old, new = before.messages[place], now.messages[place]
    is_system = Role.SYSTEM in (old.role, new.role)
    where = "system prompt" if is_system and place == 0 else f"message {place}"
    kind = FaultKind.SYSTEM if is_system else FaultKind.HISTORY
    if old.role is new.role:
        change = _part_changed(old, new, where, kind)
        if change.kind is not kind:
            return change
    else:
        change = _Texts(old.text, new.text, where).change(kind, "replaced by another message")
    return _moved(before.messages, now.messages, place, where) or change


def _part_changed(old: Message, new: Message, where: str, kind: FaultKind) -> Change:
    if old.text != new.text:
        return _Texts(old.text, new.text, where).change(kind, "text rewritten")
    for call, other in zip_longest(old.calls, new.calls):
        if _called(call) == _called(other):
            continue
        texts = _Texts(_called(call), _called(other), f"{where}, tool call")
        if call is not None and other is not None and _means_the_same(call, other):
            return texts.change(FaultKind.ORDER, "arguments written in another way")
        return texts.change(kind, "tool call rewritten")
    for result, other_result in zip_longest(old.results, new.results):
        texts = _Texts(
            result.text if result else "",
            other_result.text if other_result else "",
            f"{where}, tool result",
        )
        if texts.earlier != texts.now:
            return texts.change(kind, "tool result rewritten")
    what = "reasoning rewritten" if new.reasoning else "reasoning dropped"
    return _Texts(old.reasoning, new.reasoning, f"{where}, reasoning").change(kind, what)


def _called(call: ToolCall | None) -> str:
    return f"{call.name} {call.arguments_json}" if call else ""


def _means_the_same(call: ToolCall, other: ToolCall) -> bool:
    return call.name == other.name and canonical_json(call.arguments_json) == canonical_json(
        other.arguments_json
    )


def _moved(
    before: Sequence[Message], now: Sequence[Message], place: int, where: str
) -> Change | None:
    """Return a message that was dropped, inserted or moved at this place."""
    old, new = _key(before[place]), _key(now[place])
    old_rest, new_rest = ([_key(m) for m in each[place + 1 :]] for each in (before, now))
    kind = FaultKind.SYSTEM if where == "system prompt" else FaultKind.HISTORY
    if old in new_rest and new in old_rest:
        return Change(kind=FaultKind.ORDER, where=where, what="messages changed places")
    if new in old_rest:
        n_dropped = old_rest.index(new) + 1
        what = "message dropped" if n_dropped == 1 else f"{n_dropped} messages dropped"
        return Change(
            kind=kind, where=where, what=what, expected=before[place].text[:SHOWN_CHARACTERS]
        )
    if old in new_rest:
        n_inserted = new_rest.index(old) + 1
        what = "message inserted" if n_inserted == 1 else f"{n_inserted} messages inserted"
        shown = now[place].text[:SHOWN_CHARACTERS]
        return Change(kind=kind, where=where, what=what, got=shown)
    return None


def _is_same_conversation(earlier: SentPrompt, now: SentPrompt) -> bool:
    """Return whether the later prompt continues the earlier one.

    Replies and results tell conversations apart: two may begin with the same question.
    """
    one, other = earlier.prompt.conversation, now.prompt.conversation
    has_same_name = earlier.request.conversation == now.request.conversation
    if has_same_name or one is None or other is None:
        return True
    if is_elsewhere(earlier, now):
        return False
    said, known = _answers(one.messages), _answers(other.messages)
    if said:
        return any(each in known for each in said)
    return bool(known) and _key(one.messages[-1]) in map(_key, other.messages)


def _answers(messages: Sequence[Message]) -> list[tuple[object, ...]]:
    return [_key(each) for each in messages if each.role in (Role.ASSISTANT, Role.TOOL)]
