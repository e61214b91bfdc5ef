"""Formats of custom tools: a regular expression that stands for the whole grammar."""

import re

import pytest

from rekindle.api.responses.custom_formats import pattern_of

PATCH = r"""
// the grammar of a patch
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin" LF
end_patch: "*** End" LF?

hunk: add_hunk | delete_hunk
add_hunk: "*** Add: " filename LF add_line+
delete_hunk: "*** Delete: " filename LF

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

%import common.LF
"""
SUMS = r"""
?start: item (("+" | "-") item)*   # spaces anywhere
item.2: NUMBER | NAME [ "!" ]
      | "sqrt"i "(" NUMBER ")"
NAME: "a".."f" ~ 1..3
%import common (NUMBER, WS_INLINE)
%ignore WS_INLINE
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            PATCH,
            ["*** Begin\n*** Delete: a.py\n*** End", "*** Begin\n*** Add: x\n+1\n+\n*** End\n"],
            ["*** Begin\n*** End", "*** Begin\n*** Add: x\n*** End", "Begin"],
        ),
        (SUMS, ["1", "1 + 2", "abc ! - 3.5", "SQRT( 4 )+f"], ["", "1 +", "abcd", "+ 1"]),
        ('start: "a" "\\n" /[x\\/]/i\n', ["a\nX", "a\n/"], ["a", "ax"]),
        ("start: _x\n_x: A~2\nA: /[0-9]/", ["12"], ["1", "123"]),
        (
            'start: start "," ITEM -> more | ITEM\nITEM: /[a-z]/',
            ["a", "a,b", "a,b,c"],
            ["", ",a", "a,", "a,,b"],
        ),
        ('start: line start | line\nline: "x" | "y"', ["x", "xyx"], ["", "xz"]),
        (
            'start: start OP start | "-" start | start "!" | /[0-9]/\nOP: "+" | "*"\n'
            "%import common.WS_INLINE\n%ignore WS_INLINE",
            ["1", "1 + 2*3", "--1! + -2 !", "1!!"],
            ["", "+", "1+", "1 2", "!1", "1 -2"],
        ),
        ('start: start | "a"', ["a"], ["", "aa"]),
        ("start: start start | /[a-z]/", ["a", "ab", "abc"], ["", "1"]),
    ],
)
def test_a_grammar_without_nesting_becomes_a_pattern(
    grammar: str, good: list[str], bad: list[str]
) -> None:
    pattern = pattern_of("lark", grammar)
    assert pattern is not None
    assert [text for text in good if not re.fullmatch(pattern, text)] == []
    assert [text for text in bad if re.fullmatch(pattern, text)] == []


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" start ")" | "x"',
        'start: start "," "(" start ")" ";" | "x"',
        'start: start "a"',
        "start: missing",
        "start: x\nx: x",
        "%import python.NAME\nstart: NAME",
        '%declare X\nstart: "a"',
        "start: (",
        "start: a b{3}",
        'start: "a" ..',
        "",
        "start: " + "x" * 3 + "\nxxx: " + " ".join(["y"] * 300) + "\ny: " + '"' + "z" * 300 + '"',
    ],
)
def test_other_grammars_are_not_enforced(grammar: str) -> None:
    assert pattern_of("lark", grammar) is None


def test_a_regular_expression_is_taken_as_it_is() -> None:
    assert pattern_of("regex", "[a-z]+/") == "[a-z]+/"
    assert pattern_of(None, "anything") is None
