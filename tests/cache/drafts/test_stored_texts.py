"""Stored blocks as a source of drafts: found within a namespace, gone with their entry."""

import random
import sys
from collections.abc import Sequence

from rekindle.cache.drafts.stored_texts import MAX_FOUND, StoredTexts
from rekindle.cache.entry import BLOCK_TOKENS, Header, Key, Kind, Reason, entry_key, token_bytes
from rekindle.cache.index import Node, PrefixIndex, Where

ONE, OTHER = b"1" * 16, b"2" * 16  # roots of namespaces


class Store:
    def __init__(self, budget_bytes: int = 2**20) -> None:
        self.index = PrefixIndex(has_rows=True, has_checkpoints=False)
        self.doomed: set[Key] = set()
        self.texts = StoredTexts(
            self.index, lambda root, node: node.key in self.doomed, budget_bytes
        )

    def add(
        self, tokens: Sequence[int], root: Key = ONE, where: Where = Where.MEMORY
    ) -> list[Node]:
        parent, nodes = root, []
        for start in range(0, len(tokens), BLOCK_TOKENS):
            held = token_bytes(list(tokens[start : start + BLOCK_TOKENS]))
            header = Header(
                key=entry_key(parent, Kind.BLOCK, held),
                parent=parent,
                fingerprint=ONE,
                kind=Kind.BLOCK,
                start=start,
                tokens=held,
                payload_bytes=1,
                compute_seconds=0.1,
                reason=Reason.DECODE,
                created_at=0.0,
            )
            nodes.append(self.index.add(header, where))
            self.texts.note(nodes[-1])
            parent = header.key
        while self.texts.advance():
            pass
        return nodes


def words(seed: int, length: int) -> list[int]:
    noise = random.Random(seed)
    return [noise.randrange(100_000) for _ in range(length)]


def test_what_followed_the_last_four_tokens_is_found() -> None:
    store, text = Store(), words(1, 200)
    store.add(text)
    assert store.texts.find(ONE, [5, 6, *text[40:44]]) == text[44 : 44 + MAX_FOUND]
    assert store.texts.find(ONE, [1, 2, 3, 4]) == []
    assert store.texts.find(ONE, text[40:43]) == []


def test_a_text_is_found_across_the_end_of_its_blocks() -> None:
    store, text = Store(), words(2, 3 * BLOCK_TOKENS)
    store.add(text)
    for end in range(BLOCK_TOKENS - 6, BLOCK_TOKENS + 7):
        assert store.texts.find(ONE, text[end - 4 : end]) == text[end : end + MAX_FOUND], end


def test_another_namespace_finds_nothing() -> None:
    store, text = Store(), words(3, 300)
    store.add(text)
    assert all(store.texts.find(OTHER, text[:end]) == [] for end in range(4, 300))
    assert store.texts.after(OTHER, token_bytes(text[:100])) == []


def test_an_entry_that_is_gone_is_not_found() -> None:
    store, text = Store(), words(4, 300)
    first, second = store.add(text)
    store.index.remove(second, Where.MEMORY)
    assert store.texts.find(ONE, text[258:262]) == []
    assert store.texts.find(ONE, text[250:254]) == text[254:256]
    store.index.remove(first, Where.MEMORY)
    assert store.texts.find(ONE, text[100:104]) == []


def test_an_entry_that_is_being_deleted_is_not_found() -> None:
    store, text = Store(), words(5, 300)
    first, second = store.add(text)
    store.doomed.add(second.key)
    assert store.texts.find(ONE, text[250:254]) == text[254:256]
    assert store.texts.after(ONE, token_bytes(text[:100])) == text[100:256]
    store.doomed.add(first.key)
    assert store.texts.find(ONE, text[100:104]) == []
    assert store.texts.after(ONE, token_bytes(text[:100])) == []


def test_the_reply_that_was_last_used_follows_a_prompt() -> None:
    store, prompt = Store(), words(6, 400)
    one = store.add([*prompt, *words(7, 30)])
    other = store.add([*prompt, *words(8, 600)])
    other[1].used_at = 10.0
    assert store.texts.after(ONE, token_bytes(prompt)) == words(8, 600)
    one[1].used_at = 20.0
    assert store.texts.after(ONE, token_bytes(prompt)) == words(7, 30)


def test_nothing_follows_a_prompt_that_is_not_stored_whole() -> None:
    store, text = Store(), words(9, 300)
    store.add(text)
    assert store.texts.after(ONE, token_bytes(text)) == []
    assert store.texts.after(ONE, token_bytes([*text[:270], 1])) == []


def test_entries_of_the_disk_do_not_replace_newer_ones() -> None:
    store, text = Store(), words(10, 20)
    store.add([*text, 1, 2, 3])
    store.add([*text, 7, 8, 9], where=Where.DISK)
    assert store.texts.find(ONE, text[10:14])[:9] == [*text[14:], 1, 2, 3]


def test_memory_stays_within_its_budget_under_churn() -> None:
    budget = 2**18
    store = Store(budget)
    for seed in range(2_000):
        [node] = store.add(words(seed, BLOCK_TOKENS))
        if seed % 3 == 0:
            store.index.remove(node, Where.MEMORY)
    assert store.texts.n_bytes <= budget
    held = store.texts._table._places.nbytes + sys.getsizeof(store.texts._noted)
    held += sum(sys.getsizeof(each) for each in store.texts._noted)
    assert held <= budget
    last = words(1_999, BLOCK_TOKENS)
    assert store.texts.find(ONE, last[100:104]) == last[104 : 104 + MAX_FOUND]


def test_more_old_entries_than_fit_are_not_even_queued() -> None:
    store = Store(2**18)
    n_blocks = len(store.texts._noted)
    for seed in range(n_blocks + 50):
        text = words(seed, BLOCK_TOKENS)
        store.add(text, where=Where.DISK)
    assert store.texts._next == n_blocks
    assert store.texts.find(ONE, words(3, BLOCK_TOKENS)[50:54])
