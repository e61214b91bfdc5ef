"""Reads a grammar in llama.cpp's GBNF."""

import re

from rekindle.llama.gbnf.nodes import (
    EMPTY,
    LAST_CHARACTER,
    Alt,
    Node,
    Range,
    Ref,
    Repeat,
    Seq,
    chars_of,
    refs,
)

MAX_NESTED = 100  # parentheses in each other; picked
MAX_TIMES = 2_000  # llama.cpp's limit of a repetition
ROOT = "root"

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_LINE_END = re.compile(r"\r\n|\r|\n|\Z")
_TIMES = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"} | {each: each for each in '\\"[]-'}
_ANY = chars_of([], is_negated=True)


class GbnfError(ValueError):
    """The grammar cannot be read. The message says where."""


def parse(source: str) -> dict[str, Node]:
    """Return the rules by name. Raises GbnfError."""
    rules = _SourceReader(source).rules()
    if ROOT not in rules:
        raise GbnfError(f"there is no rule `{ROOT}`.")
    for name, node in rules.items():
        for target in refs(node):
            if target not in rules:
                raise GbnfError(f"the rule `{name}` refers to `{target}`, which is not defined.")
    return rules


class _SourceReader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip(lines=True)
        while self._next:
            name = self._name()
            self._skip(lines=False)
            if not self._takes("::="):
                raise self._fault("`::=` is expected")
            self._skip(lines=True)
            rules[name] = self._alternatives(0)
            end = _LINE_END.match(self._source, self._at)
            if end is None:
                raise self._fault("the end of the rule is expected")
            self._at = end.end()
            self._skip(lines=True)
        return rules

    def _alternatives(self, depth: int) -> Node:
        if depth > MAX_NESTED:
            raise self._fault(f"more than {MAX_NESTED} parentheses are nested")
        found = [self._sequence(depth)]
        while self._takes("|"):
            self._skip(lines=True)
            found.append(self._sequence(depth))
        return found[0] if len(found) == 1 else Alt(tuple(found))

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while (item := self._item(depth)) is not None:
            self._skip(lines=depth > 0)
            while self._next and self._next in "*+?{":
                item = self._repeated(item)
                self._skip(lines=depth > 0)
            items.append(item)
        if self._next and self._next in "*+?{":
            raise self._fault("there is nothing to repeat")
        return items[0] if len(items) == 1 else Seq(tuple(items)) if items else EMPTY

    def _item(self, depth: int) -> Node | None:
        match self._next:
            case '"':
                return self._literal()
            case "[":
                return self._set()
            case ".":
                self._at += 1
                return _ANY
            case "(":
                self._at += 1
                self._skip(lines=True)
                group = self._alternatives(depth + 1)
                if not self._takes(")"):
                    raise self._fault("`)` is expected")
                return group
            case "<" | "!":
                raise self._fault("tokens in a grammar (`<...>`) are not supported, use their text")
        return Ref(self._name()) if _NAME.match(self._source, self._at) else None

    def _literal(self) -> Node:
        self._at += 1
        characters: list[Node] = []
        while not self._takes('"'):
            code = self._character()
            characters.append(chars_of([(code, code)]))
        return characters[0] if len(characters) == 1 else Seq(tuple(characters))

    def _set(self) -> Node:
        self._at += 1
        is_negated = self._takes("^")
        ranges: list[Range] = []
        while not self._takes("]"):
            first = last = self._character()
            if self._next == "-" and not self._source.startswith("-]", self._at):
                self._at += 1
                last = self._character()
            ranges.append((first, last))
        if not ranges:
            return _ANY if is_negated else chars_of([])
        if any(first > last for first, last in ranges):
            raise self._fault("a range ends before it begins")
        return chars_of(ranges, is_negated=is_negated)

    def _character(self) -> int:
        if not self._next:
            raise self._fault("the grammar ends inside quotes or brackets")
        character = self._next
        self._at += 1
        if character != "\\":
            return ord(character)
        escaped = self._next
        self._at += 1
        if (n_digits := _HEX.get(escaped)) is not None:
            digits = self._source[self._at : self._at + n_digits]
            if not re.fullmatch(f"[0-9A-Fa-f]{{{n_digits}}}", digits):
                raise self._fault(f"{n_digits} hexadecimal digits are expected")
            self._at += n_digits
            return min(int(digits, 16), LAST_CHARACTER)
        if escaped not in _ESCAPES:
            raise self._fault(f"`\\{escaped}` is not an escape sequence")
        return ord(_ESCAPES[escaped])

    def _repeated(self, item: Node) -> Node:
        for mark, least, most in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._takes(mark):
                return Repeat(item, least, most)
        times = _TIMES.match(self._source, self._at)
        if times is None:
            raise self._fault("`{m}`, `{m,}` or `{m,n}` is expected")
        at_least = int(times[1])
        at_most = int(times[3]) if times[3] else None if times[2] else at_least
        if at_least > MAX_TIMES or (at_most is not None and at_most < at_least):
            raise self._fault(f"a repetition has at most {MAX_TIMES:,} times, in ascending order")
        self._at = times.end()
        return Repeat(item, at_least, None if at_most and at_most > MAX_TIMES else at_most)

    @property
    def _next(self) -> str:
        return self._source[self._at : self._at + 1]

    def _takes(self, text: str) -> bool:
        if not self._source.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _name(self) -> str:
        name = _NAME.match(self._source, self._at)
        if name is None:
            raise self._fault("the name of a rule is expected")
        self._at = name.end()
        return name[0]

    def _skip(self, *, lines: bool) -> None:
        space = (_SPACE_AND_LINES if lines else _SPACE).match(self._source, self._at)
        assert space is not None
        self._at = space.end()

    def _fault(self, problem: str) -> GbnfError:
        line = self._source.count("\n", 0, self._at) + 1
        near = self._source[self._at : self._at + 20].splitlines()[:1]
        return GbnfError(f"line {line}: {problem}, at {near[0] if near else 'the end'!r}.")
