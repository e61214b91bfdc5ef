"""The invariants of a prefix index, checked by walking all of it."""

from rekindle.cache.entry import Kind
from rekindle.cache.index import Node, PrefixIndex


def check_index(index: PrefixIndex) -> None:
    n_linked = 0
    for key, placeholder in index._placeholders.items():
        assert placeholder.key == key
        assert key not in index._nodes
        assert not placeholder.where
        assert placeholder._parent is None
        assert not placeholder.is_leaf
        for node in index.below(key):
            n_linked += 1
            assert index._nodes[node.key] is node
            assert node.where
    assert n_linked == len(index._nodes)
    for holder in (*index._nodes.values(), *index._placeholders.values()):
        _check_siblings(holder, holder.children, Kind.BLOCK)
        _check_siblings(holder, holder.checkpoints, Kind.CHECKPOINT)
        if holder.where and not holder.is_leaf:
            assert len(holder.tokens) == index._block_bytes


def _check_siblings(holder: Node, siblings: list[Node] | None, kind: Kind) -> None:
    if siblings is None:
        return
    assert siblings
    assert [node.tokens for node in siblings] == sorted({node.tokens for node in siblings})
    for node in siblings:
        assert node.kind is kind
        assert node._parent is holder
        assert node.start == holder.stop or not holder.where
