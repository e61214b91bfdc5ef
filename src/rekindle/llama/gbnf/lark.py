"""Translates GBNF to llguidance's Lark.

GBNF describes characters. llguidance reads lexemes and takes the longest, so `[a-z]+ "a"` as two
lexemes would never see its "a". Everything without recursion therefore becomes one regular
expression. Where a lexeme could swallow what belongs to the next one, it is split, down to single
characters if need be. They are exact but slower: a mask of JSON takes 7 ms instead of 0.4 ms.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import groupby

from rekindle.llama.gbnf.lexemes import Lexemes
from rekindle.llama.gbnf.nodes import (
    Alt,
    Chars,
    Lexeme,
    Node,
    Range,
    Ref,
    Repeat,
    Seq,
    TooComplex,
    Work,
    inner,
    refs,
)
from rekindle.llama.gbnf.parser import ROOT, GbnfError, parse

MAX_INLINED = 20_000  # sets of characters in one regular expression; picked
NOTHING = r"[^\x{0}-\x{10FFFF}]"  # no character
MAX_WORK = 500_000  # steps, about a second; picked
STEPS_PER_NODE = 3  # of a lexeme that is hashed and written out


def gbnf_to_lark(source: str) -> str:
    """Return the grammar in Lark. Raises GbnfError."""
    try:
        return _translate(parse(source), Work(MAX_WORK))
    except TooComplex as error:
        raise GbnfError(str(error)) from None
    except RecursionError:
        raise GbnfError("its rules are nested too deeply.") from None


def _translate(rules: dict[str, Node], work: Work) -> str:
    plain = _PlainRules(rules, work)
    structure = _Writer(rules, plain, work).structure()
    conflicts = Lexemes(structure, work).conflicts()
    if conflicts:
        merged = _Writer(rules, plain, work, merges=True).structure()
        if not Lexemes(merged, work).conflicts():
            structure, conflicts = merged, set()
    split: set[Node] = set()
    while conflicts:
        split |= conflicts
        structure = _Writer(rules, plain, work, split=split).structure()
        conflicts = Lexemes(structure, work).conflicts()
    names = {name: f"r{index}" for index, name in enumerate(structure)} | {ROOT: "start"}
    return "".join(f"{names[name]}: {_lark(node, names)}\n" for name, node in structure.items())


class _Writer:
    """Builds rules of references and lexemes.

    Lexemes in `split` are divided into their parts. `merges`: neighbours become one lexeme.
    """

    def __init__(
        self,
        rules: dict[str, Node],
        plain: "_PlainRules",
        work: Work,
        *,
        merges: bool = False,
        split: Set[Node] = frozenset(),
    ) -> None:
        self._rules = rules
        self._work = work
        self._plain = plain
        self._merges = merges
        self._split = split

    def structure(self) -> dict[str, Node]:
        """Return the rules that the root needs, the root first."""
        written: dict[str, Node] = {}
        needed = [ROOT]
        while needed:
            name = needed.pop()
            if name not in written:
                written[name] = self._structure(self._rules[name])
                needed += refs(written[name])
        return written

    def _structure(self, node: Node) -> Node:
        self._work.spend()
        if (plain := self._inlined(node)) is not None and self._is_whole(plain):
            return Lexeme(plain)
        match node:
            case Seq(items):
                if self._merges:
                    return Seq(tuple(self._merged(items)))
                return Seq(tuple(self._structure(item) for item in items))
            case Alt(items):
                return Alt(tuple(self._structure(item) for item in items))
            case Repeat(item, least, most):
                return Repeat(self._structure(item), least, most)
        return node

    def _merged(self, items: Sequence[Node]) -> Iterator[Node]:
        """Yield the items of a sequence, neighbours without recursion as one lexeme."""
        for is_plain, group in groupby(items, lambda item: self._inlined(item) is not None):
            run = tuple(group)
            joined = self._inlined(Seq(run)) if is_plain else None
            if joined is not None:
                yield Lexeme(joined)
            else:
                yield from map(self._structure, run)

    def _is_whole(self, plain: Node) -> bool:
        return isinstance(plain, Chars) or plain not in self._split

    def _inlined(self, node: Node) -> Node | None:
        """Return the node without references, or None if it has recursive or very long ones."""
        if not all(name in self._plain for name in refs(node)):
            return None
        size = self._plain.size(node)
        if size > MAX_INLINED:
            return None
        # The lexeme is hashed, compared and written out as a whole, wherever it stands.
        self._work.spend(STEPS_PER_NODE * size)
        return _inline(node, self._plain)


class _PlainRules(dict[str, Node]):
    """The rules without recursion that are short enough, with all references replaced."""

    def __init__(self, rules: dict[str, Node], work: Work) -> None:
        self._work = work
        self._sizes: dict[str, int] = {}
        users: dict[str, list[str]] = {name: [] for name in rules}
        n_unknown: dict[str, int] = {}
        for name, node in rules.items():
            targets = set(refs(node))
            n_unknown[name] = len(targets)
            for target in targets:
                users[target].append(name)
        ready = [name for name, n in n_unknown.items() if n == 0]
        while ready:  # a rule on a cycle never becomes ready
            name = ready.pop()
            size = self.size(rules[name])
            if size > MAX_INLINED:
                continue
            self[name], self._sizes[name] = _inline(rules[name], self), size
            for user in users[name]:
                n_unknown[user] -= 1
                if n_unknown[user] == 0:
                    ready.append(user)

    def size(self, node: Node) -> int:
        """Return the number of sets of characters in a node without unknown references."""
        self._work.spend()
        if isinstance(node, Ref):
            return self._sizes[node.name]
        return sum(map(self.size, inner(node))) or 1


def _inline(node: Node, plain: Mapping[str, Node]) -> Node:
    match node:
        case Ref(name):
            return plain[name]
        case Seq(items):
            return Seq(tuple(_inline(item, plain) for item in items))
        case Alt(items):
            return Alt(tuple(_inline(item, plain) for item in items))
        case Repeat(item, least, most):
            return Repeat(_inline(item, plain), least, most)
    return node


def _lark(node: Node, names: Mapping[str, str]) -> str:
    match node:
        case Ref(name):
            return names[name]
        case Lexeme(plain):
            return f"/{text}/" if (text := _regex(plain)) else '""'
        case Seq(items):
            return " ".join(f"({_lark(item, names)})" for item in items) or '""'
        case Alt(items):
            return " | ".join(f"({_lark(item, names)})" for item in items)
        case Repeat(item):
            return f"({_lark(item, names)}){_times(node)}"
    raise AssertionError(node)


def _regex(node: Node) -> str:
    match node:
        case Chars(ranges):
            return f"[{''.join(map(_range, ranges))}]" if ranges else NOTHING
        case Seq(items):
            return "".join(
                f"({_regex(item)})" if isinstance(item, Alt) else _regex(item) for item in items
            )
        case Alt(items):
            return f"({'|'.join(map(_regex, items))})"
        case Repeat(item):
            return f"({_regex(item)}){_times(node)}"
    raise AssertionError(node)


def _times(node: Repeat) -> str:
    match node.least, node.most:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def _range(limits: Range) -> str:
    first, last = limits
    return _escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}"


def _escaped(code: int) -> str:
    character = chr(code)
    is_plain = character.isascii() and character.isalnum()
    return character if is_plain else f"\\x{{{code:X}}}"
