"""The exact tokens of past replies. A prompt reuses them when a client sends a reply back as text.

A turn is found by the ids of its tool calls, by the meaning of the conversation up to it, or by
its text for raw completions. Callers check whether it fits.
"""

import json
import logging
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from threading import Lock

from rekindle.bounded_cache import BoundedCache
from rekindle.chat.dialects.base import ParsedCall
from rekindle.chat.prompt.meaning import KEY_BYTES, digest
from rekindle.chat.reply.parser import ParsedReply
from rekindle.generation.forgetting import Owner
from rekindle.generation.stored_turns import StoredTurn, TurnStore

_log = logging.getLogger(__name__)

FORMAT = 2
MAX_DECODED_BYTES = 32_000_000  # several hundred turns of a thousand tokens; picked
TOKEN_BYTES = 40  # of a Python integer in a tuple

_LENGTH = struct.Struct("<I")
# Fields of a turn that are written as they are.
_PLAIN_FIELDS = (
    *("n_replies_before", "gap_chars", "generation_prompt", "begins_in_reasoning", "end_text"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A reply, and the prompt it was sampled after."""

    prompt_key: bytes  # of the prompt's tokens
    n_replies_before: int = 0  # in the conversation
    gap_chars: int  # of the prompt's text between the last spliced turn and the history's end
    generation_prompt: str = ""  # the template's text after the history
    begins_in_reasoning: bool = False
    tokens: tuple[int, ...]
    end_text: str = ""  # of the token that ended the turn; empty: no token did
    said: ParsedReply

    @property
    def id(self) -> bytes:
        return digest(self.prompt_key, array("i", self.tokens).tobytes())

    def ends_like(self, text: str, piece_of: Callable[[int], bytes]) -> bool:
        """Tell whether the tokens and this text end alike, in whole characters."""
        said = self.said.text.lstrip()
        sampled = b"".join(map(piece_of, self.tokens)).decode("utf-8", "replace")
        ends_whole = bool(said) and not said.endswith("\ufffd")
        return ends_whole and text.endswith(said) and sampled.endswith(said)

    def continued(self, rest: "Turn") -> "Turn":
        """Return the turn as if the reply had not been cut before `rest`."""
        said = replace(self.said, text=self.said.text + rest.said.text, calls=rest.said.calls)
        return replace(self, tokens=self.tokens + rest.tokens, end_text=rest.end_text, said=said)


class TurnMemory:
    """The turns of one namespace in a store that all namespaces share.

    Ids and keys are digests. They are combined with a digest of the namespace, so no other
    namespace finds them.
    """

    def __init__(self, store: TurnStore, namespace: str = "") -> None:
        self._store = store
        self._namespace = namespace
        mask = blake2b(namespace.encode(), digest_size=KEY_BYTES).digest() if namespace else b""
        self._mask = int.from_bytes(mask, "big")
        self._decoded = BoundedCache[bytes, tuple[bytes, Turn | None]](max_bytes=MAX_DECODED_BYTES)
        self._lock = Lock()

    @property
    def n_bytes(self) -> int:
        """Return the size of the decoded turns."""
        return self._decoded.n_bytes

    def within(self, namespace: str) -> "TurnMemory":
        """Return a memory for one namespace, which finds no turns of other namespaces."""
        return TurnMemory(self._store, namespace)

    def remember(self, turn: Turn, keys: Iterable[bytes], owner: Owner) -> None:
        stored = StoredTurn(turn.id, tuple(dict.fromkeys(keys)), _encoded(turn), owner)
        self._store.keep(self._masked_turn(stored))

    def find(self, keys: Sequence[bytes]) -> dict[bytes, list[Turn]]:
        """Return the turns by key, most recently used first. Blocks for a moment."""
        found: dict[bytes, list[Turn]] = {key: [] for key in keys}
        masked = [*map(self._masked, keys)]
        known = self._store.find(masked, namespace=self._namespace) if keys else ()
        for stored in map(self._masked_turn, known):
            if (turn := self._turn(stored)) is not None:
                for key in stored.keys:
                    if key in found:
                        found[key].append(turn)
        return found

    def note_use(self, turns: Sequence[Turn]) -> None:
        if turns:
            self._store.touch([self._masked(turn.id) for turn in turns])

    def clear(self) -> None:
        """Drop decoded turns. The store still has those that were not deleted."""
        with self._lock:
            self._decoded.clear()

    def _turn(self, stored: StoredTurn) -> Turn | None:
        with self._lock:
            known = self._decoded.get(stored.id)
            if known is not None and known[0] == stored.data:
                return known[1]
        turn = _decoded(stored)
        with self._lock:
            self._decoded.put(stored.id, (stored.data, turn), n_bytes=_size(stored.data))
        return turn

    def _masked_turn(self, turn: StoredTurn) -> StoredTurn:
        if not self._mask:
            return turn
        return replace(turn, id=self._masked(turn.id), keys=tuple(map(self._masked, turn.keys)))

    def _masked(self, digest: bytes) -> bytes:
        """Mask a digest, or unmask a masked one: masking twice gives the digest again."""
        if not self._mask:
            return digest
        return (int.from_bytes(digest, "big") ^ self._mask).to_bytes(len(digest), "big")


def _size(data: bytes) -> int:
    """Return the size of the data and of the decoded turn, which is mostly tokens."""
    return len(data) * (1 + TOKEN_BYTES // array("i").itemsize)


def _encoded(turn: Turn) -> bytes:
    fields = {
        "format": FORMAT,
        "prompt_key": turn.prompt_key.hex(),
        **{name: getattr(turn, name) for name in _PLAIN_FIELDS},
        "reasoning": turn.said.reasoning,
        "text": turn.said.text,
        "calls": [[call.name, call.arguments_json, call.id] for call in turn.said.calls],
    }
    head = json.dumps(fields).encode()  # ASCII: a lone surrogate has no other form
    return _LENGTH.pack(len(head)) + head + array("i", turn.tokens).tobytes()


def _decoded(stored: StoredTurn) -> Turn | None:
    """Return the turn; None if another version wrote it or it is damaged. That is a miss."""
    try:
        [n_head] = _LENGTH.unpack_from(stored.data)
        fields = json.loads(stored.data[_LENGTH.size : _LENGTH.size + n_head])
        if fields["format"] != FORMAT:
            return None
        tokens = array("i")
        tokens.frombytes(stored.data[_LENGTH.size + n_head :])
        calls = tuple(ParsedCall(*call) for call in fields["calls"])
        turn = Turn(
            prompt_key=bytes.fromhex(fields["prompt_key"]),
            tokens=tuple(tokens),
            said=ParsedReply(fields["reasoning"], fields["text"], calls),
            **{name: fields[name] for name in _PLAIN_FIELDS},
        )
    except (
        *(ValueError, LookupError, TypeError, AttributeError),
        *(OverflowError, RecursionError, struct.error),
    ) as error:
        _log.warning("turns: a stored turn cannot be read: %s", error)
        return None
    return turn if turn.id == stored.id else None
