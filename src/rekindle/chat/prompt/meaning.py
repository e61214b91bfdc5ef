"""The meaning of a turn: equal for turns that differ in outer white space, JSON or call ids."""

import json
import secrets
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

from rekindle.chat.conversation import Message, Role, ToolCall
from rekindle.chat.dialects.base import ParsedCall, ReasoningMarks
from rekindle.chat.reply.parser import ParsedReply

KEY_BYTES = 16
CALL_ID_PREFIX = "call_"
# The arguments of past calls come again with every request. Both are picked.
MAX_KNOWN, MAX_KNOWN_CHARS = 4096, 1024


def means_the_same(message: Message, said: ParsedReply, marks: ReasoningMarks | None) -> bool:
    """Return whether a client's assistant message is this reply, with or without reasoning."""
    reasoning, text = split_reasoning(message, marks)
    if text.strip() != said.text.strip():
        return False
    if reasoning.strip() and reasoning.strip() != said.reasoning.strip():
        return False
    return call_meanings(message.calls) == call_meanings(said.calls)


def call_meanings(calls: Iterable[ToolCall | ParsedCall]) -> list[tuple[str, str]]:
    """Return name and canonical arguments of each call."""
    return [(call.name, canonical_json(call.arguments_json)) for call in calls]


def canonical_json(source: str) -> str:
    """Return one text for equal JSON values. Text that is not JSON is returned stripped."""
    return _canonical(source) if len(source) > MAX_KNOWN_CHARS else _known(source)


def _canonical(source: str) -> str:
    try:
        return json.dumps(json.loads(source or "{}", parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return source.strip()


_known = lru_cache(MAX_KNOWN)(_canonical)


def clear_known() -> None:
    """Drop the arguments of past calls."""
    _known.cache_clear()


def _number(text: str) -> int | float:
    """Turn 1.0 into 1: JavaScript clients have one kind of number."""
    value = float(text)
    return int(value) if value.is_integer() else value


def new_call_id() -> str:
    return f"{CALL_ID_PREFIX}{secrets.token_hex(12)}"


def call_keys(call_ids: Iterable[str]) -> list[bytes]:
    """Return keys of our own ids, which are unique. Ids that models write repeat."""
    # One client drops the underscore of `call_x`.
    bare = ["".join(filter(str.isalnum, call_id)).lower() for call_id in call_ids]
    ours = (each for each in bare if each.startswith(CALL_ID_PREFIX.rstrip("_")))
    return [digest(b"call", each.encode("utf-8", "replace")) for each in ours]


def history_keys(messages: Iterable[Message], marks: ReasoningMarks | None) -> list[bytes]:
    """Return a key of the conversation up to each message, equal for equal meaning."""
    keys = [b""]
    for message in messages:
        keys.append(next_key(keys[-1], message, marks))
    return keys[1:]


def next_key(history: bytes, message: Message, marks: ReasoningMarks | None) -> bytes:
    parts = [str(message.role)]
    if message.role is Role.ASSISTANT:
        parts.append(split_reasoning(message, marks)[1].strip())
    else:
        parts.append(message.text.strip())
    parts += [part for call in call_meanings(message.calls) for part in call]
    parts += [result.text.strip() for result in message.results]
    return digest(history, *(part.encode("utf-8", "replace") for part in parts))


def digest(*parts: bytes) -> bytes:
    state = blake2b(digest_size=KEY_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def split_reasoning(message: Message, marks: ReasoningMarks | None) -> Sequence[str]:
    """Return reasoning and text. Some clients send both as text, with the model's marks."""
    text = message.text
    if marks is None or message.reasoning or not text.lstrip().startswith(marks.opening):
        return message.reasoning, text
    inner, closing, rest = text.lstrip().removeprefix(marks.opening).partition(marks.closing)
    return (inner, rest) if closing else ("", text)
