"""Finds lexemes that could swallow what belongs to the next one.

llguidance ends a lexeme where no lexeme continues with the next byte. A text is lost if a lexeme
could end there, and the byte could begin what follows it. The sets of following characters are
those of the whole grammar, so some conflicts are reported that cannot happen.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from rekindle.llama.gbnf.nodes import (
    LAST_CHARACTER,
    Alt,
    Chars,
    Lexeme,
    Node,
    Ref,
    Repeat,
    Seq,
    Work,
    inner,
)

MAX_COPIES = 16  # of a repetition with a bound; more count as any number; picked

Mask = int  # of ranges of characters, or of first bytes


@dataclass(slots=True)
class _Automaton:
    """The places of a lexeme's characters, and which may follow each other."""

    masks: list[Mask] = field(default_factory=list)
    after: list[set[int]] = field(default_factory=list)
    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)
    is_nullable: bool = True

    def mask(self, places: set[int]) -> Mask:
        found = 0
        for place in places:
            found |= self.masks[place]
        return found


class Lexemes:
    def __init__(self, rules: dict[str, Node], work: Work) -> None:
        self._rules = rules
        self._work = work
        nodes = dict.fromkeys(each.node for rule in rules.values() for each in _lexemes_in(rule))
        self._alphabet = _Alphabet(nodes)
        self._automata = {node: self._automaton(node) for node in nodes}
        self._first = dict.fromkeys(rules, 0)
        self._nullable = dict.fromkeys(rules, False)
        self._follow_rule = dict.fromkeys(rules, 0)
        self._follow = dict.fromkeys(nodes, 0)
        while self._grow_first():
            pass
        while self._grow_follow():
            pass

    def conflicts(self) -> set[Node]:
        """Return lexemes to be split, of more than one character."""
        found: set[Node] = set()
        for node, follow in self._follow.items():
            leads = self._alphabet.leads(follow)
            for other in self._automata if leads else ():
                if self._clash(self._automata[node], self._automata[other], leads):
                    found |= {node, other}
        return {node for node in found if not isinstance(node, Chars)}

    def _clash(self, one: _Automaton, other: _Automaton, leads: Mask) -> bool:
        """Return whether `other` can go on where `one` ends, with a byte that may follow `one`."""
        self._work.spend(1 + len(one.first) * len(other.first))
        waiting = list(_meetings(one, one.first, other, other.first))
        seen = set(waiting)
        while waiting:
            here, there = waiting.pop()
            ahead = other.after[there]
            if here in one.last and self._alphabet.leads(other.mask(ahead)) & leads:
                return True
            self._work.spend(1 + len(one.after[here]) * len(ahead))
            new = set(_meetings(one, one.after[here], other, ahead)) - seen
            seen |= new
            waiting += new
        return False

    def _grow_first(self) -> bool:
        before = dict(self._first), dict(self._nullable)
        for name, node in self._rules.items():
            self._first[name], self._nullable[name] = self._begin(node)
        return before != (self._first, self._nullable)

    def _begin(self, node: Node) -> tuple[Mask, bool]:
        """Return the characters with which a node may begin, and whether it may be empty."""
        self._work.spend()
        match node:
            case Lexeme(plain):
                automaton = self._automata[plain]
                return automaton.mask(automaton.first), automaton.is_nullable
            case Ref(name):
                return self._first[name], self._nullable[name]
            case Seq(items):
                found, is_nullable = 0, True
                for item in items:
                    first, may_be_empty = self._begin(item)
                    found |= first if is_nullable else 0
                    is_nullable = is_nullable and may_be_empty
                return found, is_nullable
            case Alt(items):
                begins = [self._begin(item) for item in items]
                mask = 0
                for first, _ in begins:
                    mask |= first
                return mask, any(may_be_empty for _, may_be_empty in begins)
            case Repeat(item, least):
                first, may_be_empty = self._begin(item)
                return first, may_be_empty or least == 0
        raise AssertionError(node)

    def _grow_follow(self) -> bool:
        before = dict(self._follow), dict(self._follow_rule)
        for name, node in self._rules.items():
            self._note_follow(node, self._follow_rule[name])
        return before != (self._follow, self._follow_rule)

    def _note_follow(self, node: Node, after: Mask) -> None:
        self._work.spend()
        match node:
            case Lexeme(plain):
                self._follow[plain] |= after
            case Ref(name):
                self._follow_rule[name] |= after
            case Seq(items):
                for item in reversed(items):
                    self._note_follow(item, after)
                    first, may_be_empty = self._begin(item)
                    after = first | after if may_be_empty else first
            case Alt(items):
                for item in items:
                    self._note_follow(item, after)
            case Repeat(item, _, most):
                again = 0 if most == 1 else self._begin(item)[0]
                self._note_follow(item, after | again)

    def _automaton(self, node: Node) -> _Automaton:
        built = _Automaton()
        built.first, built.last, built.is_nullable = self._build(node, built)
        return built

    def _build(self, node: Node, into: _Automaton) -> tuple[set[int], set[int], bool]:
        """Add the places of a node. Return the first and last ones, and whether it may be empty."""
        self._work.spend()
        match node:
            case Chars():
                place = len(into.masks)
                into.masks.append(self._alphabet.mask(node))
                into.after.append(set())
                return {place}, {place}, False
            case Seq(items):
                return self._join([self._build(item, into) for item in items], into)
            case Alt(items):
                built = [self._build(item, into) for item in items]
                return (
                    set().union(*(first for first, _, _ in built)),
                    set().union(*(last for _, last, _ in built)),
                    any(may_be_empty for _, _, may_be_empty in built),
                )
            case Repeat(item, least, most):
                return self._build_repeat(item, least, most, into)
        raise AssertionError(node)

    def _build_repeat(
        self, item: Node, least: int, most: int | None, into: _Automaton
    ) -> tuple[set[int], set[int], bool]:
        if most is not None and most <= MAX_COPIES:
            parts = [self._build(item, into) for _ in range(most)]
            optional = [(first, last, True) for first, last, _ in parts[least:]]
            return self._join(parts[:least] + optional, into)
        n_copies = least if least <= MAX_COPIES and most is None else min(least, 1)
        parts = [self._build(item, into) for _ in range(max(n_copies, 1))]
        first, last, may_be_empty = parts[-1]
        self._connect(last, first, into)
        parts[-1] = first, last, may_be_empty or n_copies == 0
        return self._join(parts, into)

    def _join(
        self, parts: list[tuple[set[int], set[int], bool]], into: _Automaton
    ) -> tuple[set[int], set[int], bool]:
        first: set[int] = set()
        last: set[int] = set()
        is_nullable = True
        for begin, end, may_be_empty in parts:
            self._connect(last, begin, into)
            first |= begin if is_nullable else set()
            last = last | end if may_be_empty else end
            is_nullable = is_nullable and may_be_empty
        return first, last, is_nullable

    def _connect(self, ends: set[int], begins: set[int], into: _Automaton) -> None:
        self._work.spend(len(ends) * len(begins))
        for place in ends:
            into.after[place] |= begins


class _Alphabet:
    """The characters in ranges that no set of the grammar divides, one bit for each range."""

    def __init__(self, nodes: dict[Node, None]) -> None:
        cuts = {0, LAST_CHARACTER + 1}
        for node in nodes:
            for first, last in _ranges_in(node):
                cuts |= {first, last + 1}
        self._cuts = sorted(cuts)
        self._masks: dict[Chars, Mask] = {}
        self._leads: dict[Mask, Mask] = {}
        self._bytes = [
            _lead_bytes(first, stop - 1)
            for first, stop in zip(self._cuts, self._cuts[1:], strict=False)
        ]

    def mask(self, chars: Chars) -> Mask:
        found = self._masks.get(chars)
        if found is None:
            found = 0
            for first, last in chars.ranges:
                low, high = bisect_left(self._cuts, first), bisect_right(self._cuts, last)
                found |= (1 << high) - (1 << low)
            self._masks[chars] = found
        return found

    def leads(self, mask: Mask) -> Mask:
        """Return the first bytes of these characters in UTF-8."""
        found = self._leads.get(mask)
        if found is None:
            found = 0
            for index, each in enumerate(self._bytes):
                if mask >> index & 1:
                    found |= each
            self._leads[mask] = found
        return found


def _lead_bytes(first: int, last: int) -> Mask:
    low, high = _lead_byte(first), _lead_byte(last)
    return (1 << (high + 1)) - (1 << low)


def _lead_byte(code: int) -> int:
    return chr(code).encode("utf-8", "surrogatepass")[0]


def _meetings(
    one: _Automaton, ours: set[int], other: _Automaton, theirs: set[int]
) -> Iterator[tuple[int, int]]:
    for here in ours:
        mask = one.masks[here]
        yield from ((here, there) for there in theirs if other.masks[there] & mask)


def _lexemes_in(node: Node) -> Iterator[Lexeme]:
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Lexeme):
            yield each
        waiting += inner(each)


def _ranges_in(node: Node) -> Iterator[tuple[int, int]]:
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Chars):
            yield from each.ranges
        waiting += inner(each)
