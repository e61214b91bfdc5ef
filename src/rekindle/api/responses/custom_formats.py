"""The formats of custom tools (Lark or a regular expression) as one regular expression.

The model writes the text inside a call, in quotes or between tags. A regular expression can be
enforced there, a Lark grammar cannot, so its rules are replaced by what they stand for. A rule that
begins or ends with itself is a repetition. That works unless a rule contains itself in between.
"""

import re
from dataclasses import dataclass

MAX_PATTERN_CHARS = 2**16  # picked
_IMPORTED = {
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "FLOAT": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[A-Za-z]",
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?",
    "SIGNED_INT": "[-+]?[0-9]+",
    "SIGNED_NUMBER": r"[-+]?[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
      | (?P<literal>"(?:[^"\\\n]|\\.)*"i?)
      | (?P<regex>/(?![*/])(?:[^/\\\n]|\\.)+/[imslux]*)
      | (?P<command>%[a-z]+)
      | (?P<alias>->\s*[A-Za-z_][A-Za-z0-9_]*)
      | (?P<times>~\s*[0-9]+(?:\s*\.\.\s*[0-9]+)?)
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)
      | (?P<priority>\.-?[0-9]+)
      | (?P<range>\.\.)
      | (?P<newline>\n)
      | (?P<sign>[][()|:*+?!,])
      | (?P<space>[ \t\r\f]+)""",
    re.VERBOSE,
)
_RULE = re.compile(r"(?m)^[ \t]*[?!]*([A-Za-z_][A-Za-z0-9_]*)(?:\.-?[0-9]+)?[ \t]*:")


class NotRegular(Exception):
    """The grammar has recursion, or a part that is not known here."""


def pattern_of(syntax: str | None, definition: str) -> str | None:
    """Return a regular expression for the tool's text, or None if it cannot be enforced."""
    if syntax == "regex":
        return definition
    if syntax != "lark":
        return None
    try:
        return _Grammar(definition).pattern("start")
    except NotRegular:
        return None


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str


class _Grammar:
    def __init__(self, definition: str) -> None:
        self._rules: dict[str, list[_Token]] = {}
        self._patterns: dict[str, str] = {}
        self._open: set[str] = set()  # rules that are being replaced
        ignored: list[list[_Token]] = []
        for statement in _statements(definition):
            first = statement[0]
            if first.text == "%import":
                self._import(statement[1:])
            elif first.text == "%ignore":
                ignored.append(statement[1:])
            elif first.kind == "command":
                raise NotRegular(first.text)
            else:
                self._define(statement)
        patterns = [_Reader(each, self, between="").whole() for each in ignored]
        self._between = f"(?:{'|'.join(patterns)})*" if patterns else ""

    def pattern(self, name: str) -> str:
        """Return the regular expression that a rule or a terminal stands for."""
        if name in self._patterns:
            return self._patterns[name]
        if name in self._open or name not in self._rules:
            raise NotRegular(name)
        self._open.add(name)
        between = "" if name.isupper() else self._between
        found = f"(?:{self._body(name, between)})"
        self._open.remove(name)
        if len(found) > MAX_PATTERN_CHARS:
            raise NotRegular(name)
        self._patterns[name] = found
        return found

    def _body(self, name: str, between: str) -> str:
        """Return what a rule stands for. A rule that begins or ends with itself is a repetition.

        With `rule: rule op rule | before rule | rule after | rest`, a rule is units with `op`
        between them, and a unit is a rest with any `before` and `after` around it.
        """
        parts: dict[tuple[bool, bool], list[str]] = {}
        for tokens in _alternatives(self._rules[name]):
            begins = _refers(tokens[:2], name)
            ends = len(tokens) > begins and _refers(tokens[-1:], name)
            inner = tokens[begins : len(tokens) - ends]
            if len(tokens) > 1 or not begins:  # `rule: rule` says nothing
                found = _Reader(inner, self, between=between).whole()
                parts.setdefault((begins, ends), []).append(found)
        if not parts:
            raise NotRegular(name)
        if parts.keys() <= {(False, False)}:
            return "|".join(parts.get((False, False), ()))
        rests, befores, afters, operators = (
            f"(?:{'|'.join(parts[key])})" if key in parts else None
            for key in ((False, False), (False, True), (True, False), (True, True))
        )
        if rests is None:
            raise NotRegular(name)  # no text has an end
        unit = f"(?:{befores}{between})*{rests}" if befores else rests
        unit += f"(?:{between}{afters})*" if afters else ""
        return unit + (f"(?:{between}{operators}{between}{unit})*" if operators else "")

    def _import(self, tokens: list[_Token]) -> None:
        names = [each.text for each in tokens if each.kind == "name"]
        module, _, only = names[0].partition(".") if names else ("", "", "")
        wanted = [only] if only else names[1:]
        alias = tokens[-1].text[2:].strip() if tokens and tokens[-1].kind == "alias" else None
        for name in wanted:
            if module != "common" or name not in _IMPORTED:
                raise NotRegular(name)
            self._patterns[alias or name] = f"(?:{_IMPORTED[name]})"

    def _define(self, statement: list[_Token]) -> None:
        head = [each for each in statement if each.text not in "?!" and each.kind != "priority"]
        if len(head) < 2 or head[0].kind != "name" or head[1].text != ":":
            raise NotRegular(head[0].text if head else "")
        body = statement[statement.index(head[1]) + 1 :]
        self._rules[head[0].text] = body


class _Reader:
    """Reads the body of one rule."""

    def __init__(self, tokens: list[_Token], grammar: _Grammar, *, between: str) -> None:
        self._tokens = tokens
        self._grammar = grammar
        self._between = between  # what may stand between two parts
        self._at = 0

    def whole(self) -> str:
        found = self._alternatives()
        if self._at < len(self._tokens):
            raise NotRegular(self._tokens[self._at].text)
        return found

    def _alternatives(self) -> str:
        found = [self._sequence()]
        while self._takes("|"):
            found.append(self._sequence())
        return "|".join(found)

    def _sequence(self) -> str:
        parts: list[str] = []
        while (part := self._part()) is not None:
            parts.append(self._repeated(part))
        if self._kind == "alias":
            self._at += 1
        return self._between.join(parts)

    def _part(self) -> str | None:
        token = self._next
        if token is None:
            return None
        if token.kind in ("literal", "regex", "name"):
            self._at += 1
            if token.kind == "name":
                return self._grammar.pattern(token.text)
            if token.kind == "regex":
                return _regex(token.text)
            if self._kind == "range":
                last = self._tokens[self._at + 1] if self._at + 1 < len(self._tokens) else None
                if last is None or last.kind != "literal":
                    raise NotRegular("..")
                self._at += 2
                return f"[{re.escape(_unquoted(token))}-{re.escape(_unquoted(last))}]"
            flag = "(?i:" if token.text.endswith("i") else "(?:"
            return f"{flag}{_escaped(_unquoted(token))})"
        for opening, closing, mark in (("(", ")", ""), ("[", "]", "?")):
            if self._takes(opening):
                inner = self._alternatives()
                if not self._takes(closing):
                    raise NotRegular(opening)
                return f"(?:{inner}){mark}"
        return None

    def _repeated(self, part: str) -> str:
        while (token := self._next) is not None:
            if token.text in "*+?" and token.kind == "sign":
                more = f"(?:{self._between}{part})" if self._between else part
                part = {
                    "?": f"(?:{part})?",
                    "*": f"(?:{part}{more}*)?" if self._between else f"(?:{part})*",
                    "+": f"(?:{part}{more}*)" if self._between else f"(?:{part})+",
                }[token.text]
            elif token.kind == "times":
                least, _, most = token.text[1:].replace(" ", "").partition("..")
                part = f"(?:{self._between}{part}){{{least},{most or least}}}"
            else:
                break
            self._at += 1
        return part

    @property
    def _next(self) -> _Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    @property
    def _kind(self) -> str:
        return self._next.kind if self._next else ""

    def _takes(self, sign: str) -> bool:
        token = self._next
        if token is None or token.kind != "sign" or token.text != sign:
            return False
        self._at += 1
        return True


def _alternatives(tokens: list[_Token]) -> list[list[_Token]]:
    """Split the body of a rule at each `|` outside of brackets. Aliases are dropped."""
    found: list[list[_Token]] = [[]]
    depth = 0
    for token in tokens:
        if token.kind == "sign":
            depth += (token.text in "([") - (token.text in ")]")
        if token.kind == "sign" and token.text == "|" and depth == 0:
            found.append([])
        elif token.kind != "alias" or depth:
            found[-1].append(token)
    return found


def _refers(tokens: list[_Token], name: str) -> bool:
    """Return whether the first token is this rule, exactly once."""
    is_repeated = any(each.kind == "times" or each.text in ("*", "+", "?") for each in tokens[1:])
    return bool(tokens) and tokens[0] == _Token("name", name) and not is_repeated


def _statements(definition: str) -> list[list[_Token]]:
    """Split a grammar into rules and commands. A line with `|` continues the rule before it."""
    found: list[list[_Token]] = [[]]
    depth = at = 0
    while at < len(definition):
        begins = at == 0 or definition[at - 1] == "\n"
        if begins and depth == 0 and (_RULE.match(definition, at) or definition[at] == "%"):
            found.append([])
        match = _TOKEN.match(definition, at)
        if match is None:
            raise NotRegular(definition[at])
        kind = match.lastgroup or ""
        at = match.end()
        if kind in ("space", "comment", "newline"):
            continue
        depth += (match[0] in ("(", "[")) - (match[0] in (")", "]"))
        found[-1].append(_Token(kind, match[0]))
    return [statement for statement in found if statement]


def _unquoted(token: _Token) -> str:
    text = token.text.removesuffix("i")[1:-1]
    names = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
    return re.sub(r"\\(.)", lambda match: names.get(match[1], match[1]), text)


def _escaped(text: str) -> str:
    """Return the text as a regular expression that Rust reads as well."""
    signs = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\f": r"\f"}
    return "".join(
        signs.get(each) or (f"\\{each}" if each in r"\.+*?()|[]{}^$/" else each) for each in text
    )


def _regex(text: str) -> str:
    body, _, flags = text[1:].rpartition("/")
    flags = "".join(flag for flag in flags if flag in "imsx")
    return f"(?{flags}:{body})" if flags else f"(?:{body})"
