"""The index against a model that tries every length, and what a tree must not get wrong."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rekindle.cache.entry import Header, Key, Kind, Reason, entry_key, token_bytes
from rekindle.cache.index import Match, Node, PrefixIndex, Where
from tests.support.index_check import check_index

ROOT = b"r" * 16
SIZE = 3  # tokens of a block
BOTH = Where.MEMORY | Where.DISK


def chain(tokens: list[int]) -> Key:
    """The key of a prefix of whole blocks."""
    key = ROOT
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        key = entry_key(key, Kind.BLOCK, token_bytes(tokens[start : start + SIZE]))
    return key


def entry(kind: Kind, start: int, tokens: list[int]) -> Header:
    """What holds `tokens[start:]`, behind the whole blocks before it."""
    parent, held = chain(tokens[:start]), token_bytes(tokens[start:])
    return Header(
        key=entry_key(parent, kind, held),
        parent=parent,
        fingerprint=ROOT,
        kind=kind,
        start=start,
        tokens=held,
        payload_bytes=len(held) * 100,
        compute_seconds=0.1,
        reason=Reason.PREFILL,
        created_at=0.0,
    )


def block(*tokens: int) -> Header:
    return entry(Kind.BLOCK, (len(tokens) - 1) // SIZE * SIZE, list(tokens))


def checkpoint(*tokens: int) -> Header:
    return entry(Kind.CHECKPOINT, len(tokens) // SIZE * SIZE, list(tokens))


def path(*tokens: int) -> list[Header]:
    """All blocks of a prefix."""
    stops = [*range(SIZE, len(tokens), SIZE), len(tokens)]
    return [block(*tokens[:stop]) for stop in stops]


def dense() -> PrefixIndex:
    return PrefixIndex(has_rows=True, has_checkpoints=False, block_tokens=SIZE)


def hybrid() -> PrefixIndex:
    return PrefixIndex(has_rows=True, has_checkpoints=True, block_tokens=SIZE)


def recurrent() -> PrefixIndex:
    return PrefixIndex(has_rows=False, has_checkpoints=True, block_tokens=SIZE)


def filled(index: PrefixIndex, *headers: Header, where: Where = Where.MEMORY) -> PrefixIndex:
    for header in headers:
        index.add(header, where)
    check_index(index)
    return index


def match(index: PrefixIndex, *tokens: int) -> Match:
    return index.match(ROOT, token_bytes(tokens))


def node_of(index: PrefixIndex, header: Header) -> Node:
    node = index.get(header.key)
    assert node is not None
    return node


def test_a_dense_match_ends_inside_a_block() -> None:
    index = filled(dense(), *path(1, 2, 3, 4, 5, 6))
    found = match(index, 1, 2, 3, 4, 5, 9, 9)
    assert found.n_tokens == 5
    assert [node.stop for node in found.blocks] == [3, 6]


def test_the_best_of_many_children_is_found_on_either_side() -> None:
    children = [block(1, 1, 1), block(5, 5, 5), block(5, 7, 1), block(9, 9, 9)]
    index = filled(dense(), *children)
    assert match(index, 5, 5, 9).blocks == (node_of(index, children[1]),)
    assert match(index, 5, 7, 0).blocks == (node_of(index, children[2]),)
    assert match(index, 4, 4, 4) == Match(0, (), None)


@pytest.mark.parametrize("in_memory", [0, 1])
def test_between_equal_children_the_one_in_memory_is_used(in_memory: int) -> None:
    children = [block(5, 5, 1), block(5, 5, 9)]
    index = filled(dense(), *children, where=Where.DISK)
    index.add(children[in_memory], Where.MEMORY)
    assert match(index, 5, 5, 4).blocks == (node_of(index, children[in_memory]),)


def test_a_short_block_never_has_the_rest_of_the_path_behind_it() -> None:
    index = filled(dense(), block(1, 2), *path(1, 2, 3, 4))
    assert match(index, 1, 2, 3, 4).n_tokens == 4
    index.remove(node_of(index, block(1, 2, 3)), BOTH)
    assert match(index, 1, 2, 3, 4).n_tokens == 2


def test_a_checkpoint_without_its_rows_falls_back_to_a_shallower_one() -> None:
    states = [checkpoint(1, 2), checkpoint(1, 2, 3, 4, 5, 6, 7, 8)]
    index = filled(hybrid(), *path(1, 2, 3, 4, 5, 6, 7, 8), *states)
    assert match(index, 1, 2, 3, 4, 5, 6, 7, 8, 9).n_tokens == 8
    index.remove(node_of(index, block(1, 2, 3, 4, 5, 6, 7, 8)), BOTH)
    found = match(index, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert found.n_tokens == 2
    assert found.checkpoint is node_of(index, checkpoint(1, 2))


def test_the_longest_of_several_checkpoints_behind_one_block_serves() -> None:
    states = [checkpoint(1), checkpoint(1, 1), checkpoint(1, 3)]
    index = filled(hybrid(), block(1, 2, 3), block(1, 3, 3), *states)
    assert match(index, 1, 3, 5).checkpoint is node_of(index, checkpoint(1, 3))
    # The neighbour of (1, 2) in order is (1, 1), which is not on its way.
    assert match(index, 1, 2, 3).checkpoint is node_of(index, checkpoint(1))


def test_rows_beyond_the_last_checkpoint_do_not_count() -> None:
    index = filled(hybrid(), *path(1, 2, 3, 4, 5, 6), checkpoint(1, 2, 3, 4))
    found = match(index, 1, 2, 3, 4, 5, 6)
    assert found.n_tokens == 4
    assert [node.stop for node in found.blocks] == [3, 6]


def test_a_checkpoint_at_a_block_s_end_needs_no_further_block() -> None:
    index = filled(hybrid(), *path(1, 2, 3, 4), checkpoint(1, 2, 3))
    assert match(index, 1, 2, 3, 4) == Match(
        3, (node_of(index, block(1, 2, 3)),), node_of(index, checkpoint(1, 2, 3))
    )


def test_a_recurrent_checkpoint_needs_the_path_and_no_rows_behind_it() -> None:
    index = filled(recurrent(), block(1, 2, 3), checkpoint(1, 2, 3, 4, 5))
    assert match(index, 1, 2, 3, 4, 5).n_tokens == 5
    index.remove(node_of(index, block(1, 2, 3)), BOTH)
    assert match(index, 1, 2, 3, 4, 5).n_tokens == 0


def test_a_state_at_position_0_is_not_a_match() -> None:
    index = filled(hybrid(), checkpoint())
    assert match(index, 1, 2, 3) == Match(0, (), None)


def test_a_node_leaves_with_its_last_residence() -> None:
    index = filled(dense(), block(1, 2, 3), where=BOTH)
    node = node_of(index, block(1, 2, 3))
    index.remove(node, Where.MEMORY)
    assert match(index, 1, 2, 3).n_tokens == 3
    index.remove(node, Where.DISK)
    assert match(index, 1, 2, 3).n_tokens == 0
    assert len(index) == 0


def test_removing_a_removed_node_does_not_affect_its_successor() -> None:
    index = filled(dense(), block(1, 2, 3))
    before = node_of(index, block(1, 2, 3))
    index.remove(before, BOTH)
    index.add(block(1, 2, 3), Where.MEMORY)
    index.remove(before, BOTH)
    assert match(index, 1, 2, 3).n_tokens == 3


def test_a_subtree_comes_back_with_its_parent() -> None:
    headers = [*path(1, 2, 3, 4, 5, 6, 7), checkpoint(1, 2, 3, 4, 5, 6, 7)]
    index = filled(hybrid(), *reversed(headers))
    assert match(index, 1, 2, 3, 4, 5, 6, 7).n_tokens == 7
    index.remove(node_of(index, headers[0]), BOTH)
    assert match(index, 1, 2, 3, 4, 5, 6, 7).n_tokens == 0
    index.add(headers[0], Where.DISK)
    assert match(index, 1, 2, 3, 4, 5, 6, 7).n_tokens == 7


def test_an_orphan_and_the_first_block_have_no_parent() -> None:
    index = filled(dense(), *path(1, 2, 3, 4, 5, 6, 7))
    first, second, third = (node_of(index, header) for header in path(1, 2, 3, 4, 5, 6, 7))
    assert first.parent is None
    assert third.parent is second
    index.remove(second, BOTH)
    assert third.parent is None


def test_a_longer_block_covers_the_short_ones_it_starts_with() -> None:
    index = filled(dense(), block(1), block(1, 2), block(1, 9), block(2), block(1, 2, 3))
    covered = index.covered_by(node_of(index, block(1, 2, 3)))
    assert [node.n_tokens for node in covered] == [2, 1]
    assert index.covered_by(node_of(index, block(1))) == []


def test_a_short_block_is_covered_by_an_equal_or_a_longer_one() -> None:
    index = filled(dense(), block(1, 2), block(4, 4, 4))
    assert index.is_covered(ROOT, token_bytes([1]))
    assert index.is_covered(ROOT, token_bytes([1, 2]))
    assert not index.is_covered(ROOT, token_bytes([1, 2, 3]))
    assert not index.is_covered(ROOT, token_bytes([3]))
    assert not index.is_covered(chain([4, 4, 4]), token_bytes([4]))


def test_the_checkpoints_before_a_node_are_those_of_its_own_path() -> None:
    own = [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6)]
    others = [(2,), (1, 3), (1, 2, 3, 5), (1, 2, 3, 4, 5, 6, 7)]
    index = filled(hybrid(), *path(1, 2, 3, 4, 5, 6), *(checkpoint(*each) for each in own + others))
    tip = node_of(index, checkpoint(1, 2, 3, 4, 5, 6))
    assert [node.stop for node in index.checkpoints_before(tip)] == [1, 2, 3, 4]


def test_a_node_is_no_leaf_until_its_checkpoint_is_removed() -> None:
    index = filled(hybrid(), block(1, 2, 3), checkpoint(1, 2, 3, 4))
    node = node_of(index, block(1, 2, 3))
    assert not node.is_leaf
    index.remove(node_of(index, checkpoint(1, 2, 3, 4)), BOTH)
    assert node.is_leaf


# Few token ids and small blocks: prefixes share, diverge inside blocks and cover each other.
conversations = st.lists(st.integers(0, 1), max_size=7)
tiers = st.sampled_from([Where.MEMORY, Where.DISK, BOTH])


class AgainstEveryLength(RuleBasedStateMachine):
    """Adds and removes in any order; a match is the longest length that a search finds."""

    stored: dict[Key, tuple[Header, Where]]
    index: PrefixIndex
    told: list[list[int]]  # conversations so far

    @initialize(make=st.sampled_from([dense, hybrid, recurrent]))
    def start(self, make: Callable[[], PrefixIndex]) -> None:
        self.index = make()
        self.has_rows = make is not recurrent
        self.has_checkpoints = make is not dense
        self.stored = {}
        self.told = [[0]]

    @rule(tokens=conversations.filter(bool), where=tiers)
    def add_block(self, tokens: list[int], where: Where) -> None:
        self._add(block(*tokens), where)

    @rule(data=st.data(), more=conversations.filter(bool), where=tiers)
    def continue_a_conversation(self, data: st.DataObject, more: list[int], where: Where) -> None:
        before = data.draw(st.sampled_from(self.told))
        tokens = before[: data.draw(st.integers(0, len(before)))] + more
        self.told.append(tokens)
        headers = [*path(*tokens), checkpoint(*tokens)]
        for header in data.draw(st.permutations(headers)):
            self._add(header, where)

    @rule(tokens=conversations, where=tiers)
    def add_checkpoint(self, tokens: list[int], where: Where) -> None:
        self._add(checkpoint(*tokens), where)

    @precondition(lambda self: self.stored)
    @rule(data=st.data(), where=tiers)
    def remove(self, data: st.DataObject, where: Where) -> None:
        key = data.draw(st.sampled_from(sorted(self.stored)))
        header, before = self.stored.pop(key)
        if before & ~where:
            self.stored[key] = (header, before & ~where)
        self.index.remove(node_of(self.index, header), where)

    @rule(more=conversations)
    def match(self, more: list[int]) -> None:
        cuts = {tuple(tokens[:stop]) for tokens in self.told for stop in range(len(tokens) + 1)}
        for cut in cuts:
            tokens = [*cut, *more]
            found = match(self.index, *tokens)
            assert found.n_tokens == max(self._restorable(tokens), default=0)
            self._assert_it_holds(found, tokens)

    @rule(tokens=conversations.filter(bool))
    def cover(self, tokens: list[int]) -> None:
        header = block(*tokens)
        held = [each.tokens for each, _ in self._behind(header.parent, Kind.BLOCK)]
        is_covered = any(each.startswith(header.tokens) for each in held)
        assert self.index.is_covered(header.parent, header.tokens) == is_covered
        if node := self.index.get(header.key):
            covered = {each for each in held if header.tokens.startswith(each)} - {header.tokens}
            assert {each.tokens for each in self.index.covered_by(node)} == covered

    @invariant()
    def the_index_is_sound(self) -> None:
        check_index(self.index)
        known = {node.key: node.where for node in self.index.nodes()}
        assert known == {key: where for key, (_, where) in self.stored.items()}
        below = [node.key for node in self.index.below(ROOT)]
        assert sorted(below) == sorted(self._attached(ROOT))

    def _add(self, header: Header, where: Where) -> None:
        _, before = self.stored.get(header.key, (header, Where(0)))
        self.stored[header.key] = (header, before | where)
        self.index.add(header, where)

    def _behind(self, parent: Key, kind: Kind) -> list[tuple[Header, Where]]:
        return [
            (header, where)
            for header, where in self.stored.values()
            if header.parent == parent and header.kind is kind
        ]

    def _attached(self, parent: Key) -> Iterator[Key]:
        for header, _ in self._behind(parent, Kind.BLOCK) + self._behind(parent, Kind.CHECKPOINT):
            yield header.key
            yield from self._attached(header.key)

    def _restorable(self, tokens: list[int]) -> list[int]:
        return [n for n in range(1, len(tokens) + 1) if self._is_restorable(tokens[:n])]

    def _is_restorable(self, prefix: list[int]) -> bool:
        whole = len(prefix) // SIZE * SIZE
        if any(chain(prefix[:stop]) not in self.stored for stop in range(SIZE, whole + 1, SIZE)):
            return False
        rest = token_bytes(prefix[whole:])
        blocks = self._behind(chain(prefix), Kind.BLOCK)
        if rest and self.has_rows and not any(each.tokens.startswith(rest) for each, _ in blocks):
            return False
        return not self.has_checkpoints or checkpoint(*prefix).key in self.stored

    def _assert_it_holds(self, found: Match, tokens: list[int]) -> None:
        prefix = tokens[: found.n_tokens]
        n_blocks = -(-len(prefix) // SIZE) if self.has_rows else len(prefix) // SIZE
        assert [node.start for node in found.blocks] == [i * SIZE for i in range(n_blocks)]
        for node in found.blocks:
            needed = token_bytes(prefix[node.start : node.start + SIZE])
            assert node.tokens.startswith(needed)
            assert node.key in self.stored
        if self.has_checkpoints and prefix:
            assert found.checkpoint is node_of(self.index, checkpoint(*prefix))
        else:
            assert found.checkpoint is None


AgainstEveryLength.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestAgainstEveryLength = AgainstEveryLength.TestCase
