"""A Backend without a model: it checks every position it is given and counts what it computes."""

import zlib
from collections.abc import Callable, Sequence

from rekindle.errors import ContextFull, DecodeFailed, InvalidRequest
from rekindle.generation import Grammar, Sampling, TokenSampled

END = 0  # the only end-of-generation token


def next_token(prefix: Sequence[int]) -> int:
    """A function of the whole prefix, so that a wrong row anywhere changes the reply."""
    return 1 + zlib.crc32(b",".join(b"%d" % token for token in prefix)) % 9_999


class FakeSampler:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class FakeBackend:
    eog_tokens = frozenset({END})

    def __init__(
        self,
        *,
        n_slots: int = 4,
        n_cells: int = 4096,
        n_ubatch: int = 512,
        reply: Callable[[Sequence[int]], int] = next_token,
    ) -> None:
        self.n_slots = n_slots
        self.n_cells = n_cells
        self.n_ctx = n_cells
        self.n_ubatch = n_ubatch
        self.slots: dict[int, list[int]] = {}
        self.samplers: list[FakeSampler] = []
        self.batches: list[list[int]] = []  # per decode: how many tokens each slot got
        self.decode_failures: list[DecodeFailed | ContextFull] = []
        self.fail_sampling_of: set[int] = set()  # last tokens whose row cannot be sampled
        self._reply = reply
        self._rows: list[list[int]] = []

    @property
    def n_computed(self) -> int:
        return sum(sum(batch) for batch in self.batches)

    def decode(
        self,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        outputs: list[int],
    ) -> None:
        if self.decode_failures:
            raise self.decode_failures.pop(0)
        if sum(map(len, self.slots.values())) + len(tokens) > self.n_cells:
            raise ContextFull("fake context is full")
        self._rows = []
        for index, (token, position, slot) in enumerate(zip(tokens, positions, slots, strict=True)):
            rows = self.slots.setdefault(slot, [])
            assert position == len(rows), f"slot {slot} expects position {len(rows)}"
            rows.append(token)
            if index in outputs:
                self._rows.append(list(rows))
        self.batches.append([list(slots).count(slot) for slot in dict.fromkeys(slots)])

    def sample(
        self, samplers: Sequence[FakeSampler], rows: Sequence[int]
    ) -> list[TokenSampled | Exception]:
        assert not any(sampler.closed for sampler in samplers)
        return [
            ValueError("no token fits")
            if self._rows[row][-1] in self.fail_sampling_of
            else TokenSampled(self._reply(self._rows[row]))
            for row in rows
        ]

    def new_sampler(
        self, sampling: Sampling, prompt: tuple[int, ...], n_top_logprobs: int | None
    ) -> FakeSampler:
        self.samplers.append(FakeSampler())
        return self.samplers[-1]

    def check_grammar(self, grammar: Grammar) -> None:
        if grammar.source == "bad":
            raise InvalidRequest("bad grammar")

    def clear_slot(self, slot: int) -> None:
        self.slots.pop(slot, None)

    def trim_slot(self, slot: int, n_keep: int) -> bool:
        del self.slots[slot][n_keep:]
        return True

    def copy_slot(self, source: int, target: int) -> None:
        self.slots[target] = list(self.slots[source])

    def export_rows(self, slot: int, start: int, stop: int) -> bytes:
        return b"".join(token.to_bytes(4, "little") for token in self.slots[slot][start:stop])

    def import_rows(self, slot: int, start: int, stop: int, rows: bytes) -> None:
        held = self.slots.setdefault(slot, [])
        assert len(held) == start
        held += [int.from_bytes(rows[i : i + 4], "little") for i in range(0, len(rows), 4)]

    def export_checkpoint(self, slot: int) -> bytes:
        return b""

    def import_checkpoint(self, slot: int, checkpoint: bytes) -> None:
        assert checkpoint == b""

    def n_positions(self, slot: int) -> int:
        return len(self.slots.get(slot, []))

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        assert not self.slots, "slots are still in use"


def expected_reply(
    prompt: Sequence[int], n_tokens: int, reply: Callable[[Sequence[int]], int] = next_token
) -> list[int]:
    """What a request gets when it runs alone."""
    tokens = list(prompt)
    for _ in range(n_tokens):
        tokens.append(reply(tokens))
    return tokens[len(prompt) :]
