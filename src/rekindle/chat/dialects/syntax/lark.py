"""Grammars of calls, in the Lark that llguidance reads.

Each tool has a rule, so that each `%json` is a whole schema and its `$ref`s are resolved in it.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rekindle.chat.dialects.syntax.cursor import tokens_of

Schema = dict[str, Any]
Schemas = Mapping[str, Schema]  # of the arguments by name of the tool
Literal = Callable[[str], str]  # text as a Lark expression: control strings become tokens

# Without a bound on white space, a small model may emit line breaks for ever.
N_SPACES = 8

_JSON_SIGNS = frozenset("{}[]:,")

_SLASH = re.compile(r"(\\.)|/", re.DOTALL)  # escaped characters, and slashes that are not
_ELSEWHERE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')
_COMBINING = {"patternProperties", "anyOf", "oneOf", "allOf", "$ref"}


def usable_schemas(schemas: Schemas, is_valid: Callable[[Schema], bool]) -> Schemas:
    """Return schemas that compile. A schema that does not is replaced by one for any object.

    Single parameters are checked as well, since some dialects have a rule for each.
    """
    return {name: _usable(schema, is_valid) for name, schema in schemas.items()}


def _usable(schema: Schema, is_valid: Callable[[Schema], bool]) -> Schema:
    if not is_valid(bounded(arguments_schema(schema))):
        return {"type": "object"}
    if not declares_all(schema):
        return schema
    properties = {
        key: own
        if not isinstance(own, dict) or is_valid(bounded(with_definitions(own, schema)))
        else {}
        for key, own in schema.get("properties", {}).items()
    }
    return {**schema, "properties": properties}


def anchored(pattern: str) -> str:
    """Return a schema's `pattern` for the whole text: JSON schemas search in it otherwise."""
    return f"^(?:{pattern})$"


def whole_pattern(schema: Schema) -> str | None:
    """Return the pattern of the whole text, in the form for Lark; None: there is none."""
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or not re.fullmatch(r"\^\(\?:.*\)\$", pattern, re.DOTALL):
        return None
    return _SLASH.sub(lambda match: match[1] or r"\/", pattern[1:-1])


def literals(control_tokens: Mapping[str, int]) -> Literal:
    """Return a function that quotes text, with a token in place of each control string."""
    known = sorted(filter(None, control_tokens), key=len, reverse=True)
    pattern = re.compile("(" + "|".join(map(re.escape, known)) + ")") if known else None

    def literal(text: str) -> str:
        pieces = pattern.split(text) if pattern else [text]
        return " ".join(
            f"<[{control_tokens[piece]}]>" if piece in control_tokens else quote(piece)
            for piece in pieces
            if piece
        )

    return literal


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def bounded(schema: Schema, n_spaces: int = N_SPACES) -> Schema:
    pattern = rf"[ \n]?[ ]{{0,{n_spaces}}}"
    return {**schema, "x-guidance": {"whitespace_pattern": pattern, "lenient": True}}


def arguments_schema(schema: Schema) -> Schema:
    """Return a schema for an object. If it declares members, no others are allowed."""
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        schema = {}
    closed = {"additionalProperties": False} if declares_all(schema) else {}
    return {**schema, **closed, "type": "object"}


def declares_all(schema: Schema) -> bool:
    others = schema.get("additionalProperties", not schema.keys() & {"properties"})
    return others is False and not _COMBINING & schema.keys()


def with_definitions(schema: Schema, root: Schema) -> Schema:
    """Return a part of a schema as a whole one. References outside definitions allow anything."""
    whole = dict(schema)
    for key in ("$defs", "definitions"):
        if key in root:
            whole[key] = root[key]
    return {} if _ELSEWHERE.search(json.dumps(whole)) else whole


class Rules:
    """The rules of one grammar. A rule may be used before it is added."""

    def __init__(self, literal: Literal, *, parallel: bool) -> None:
        self.literal = literal
        self._parallel = parallel  # several calls in one reply
        self._rules: dict[str, str] = {}
        self._n_spaces = self._n_spaces_in_json = N_SPACES

    def allow_spaces(self, n_spaces: int, *, in_json: int) -> None:
        """Allow that much white space if that is more than usual."""
        self._n_spaces = max(N_SPACES, n_spaces)
        self._n_spaces_in_json = max(N_SPACES, in_json)

    def add(self, name: str, body: str, *, options: str = "") -> str:
        self._rules[name] = f"{name}{options}: {body}"
        return name

    def one_of(self, name: str, bodies: Iterable[str]) -> str:
        return self.add(name, "\n    | ".join(bodies))

    def json(self, name: str, schema: Schema) -> str:
        return self.add(name, "%json " + json.dumps(bounded(schema, self._n_spaces_in_json)))

    def calls(
        self,
        schemas: Schemas,
        write: Callable[[str, str], str],
        arguments: Callable[[str, Schema], str] | None = None,
        *,
        name: str = "call",
    ) -> str:
        """Add a rule with one alternative per tool.

        `write` gets the tool's name and an expression of its arguments. That expression is
        JSON, or made by `arguments` from the name for a rule and the schema.
        """
        arguments = arguments or self.json
        return self.one_of(
            name,
            (
                write(tool, arguments(f"arguments_{i}", arguments_schema(schema)))
                for i, (tool, schema) in enumerate(schemas.items())
            ),
        )

    def repeated(self, call: str, *, separator: str = "SPACE?") -> str:
        return f"{call} ({separator} {call})*" if self._parallel else call

    def raw_until(self, name: str, closing: str, pattern: str = r"(?s:.*)") -> str:
        """Add a rule for any text up to a mark, with the mark."""
        expression = self.literal(closing)
        if expression == quote(closing):
            return self.add(name, f"/{pattern}/", options=f"[suffix={expression}]")
        # Text cannot contain a control token, so no suffix is needed.
        text = self.add(f"{name}_text", f"/{pattern}/")
        return self.add(name, f"{text} {self.literal(closing.lstrip())}")

    def source(self, start: str) -> str:
        space = rf"SPACE: /[ \n]{{1,{self._n_spaces}}}/"
        rules = [f"start: SPACE? {start}", *self._rules.values(), space]
        return "\n".join(rules) + "\n"


def fixed(rules: Rules, text: str) -> str:
    """Return Lark for fixed text. Around JSON and between tags, other spacing is allowed."""
    if not text.strip():
        return rules.literal(text) if text else ""
    found, run, left = [], "", ""
    for gap, token in tokens_of(text):
        if _is_loose(left, gap, token):
            found += [run, None]
            run = token
        else:
            run += gap + token
        left = token
    return " ".join(
        "SPACE?" if each is None else rules.literal(each) for each in (*found, run) if each != ""
    )


def _is_loose(left: str, gap: str, right: str) -> bool:
    """Return whether any white space may stand between two tokens; "": there is none."""
    if not left or not right:
        return bool(gap) and (_is_json(left or right) or _is_tag(left, right))
    if gap:
        return (_is_json(right) or _is_json(left) or _is_tag(left, right)) and left != '"'
    behind = left != '"' and (_is_json(left) or left.endswith(">"))
    return behind and (_is_json(right) or (right.startswith("<") and _is_json(left)))


def _is_json(token: str) -> bool:
    return token in _JSON_SIGNS or token.startswith('"')


def _is_tag(left: str, right: str) -> bool:
    return left.endswith(">") or right.startswith("<")
