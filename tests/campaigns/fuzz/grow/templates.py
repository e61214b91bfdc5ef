"""Jinja templates grown at random: what a model file may bring along."""

import random

from tests.campaigns.fuzz.grow import hostile

NAMES = (
    *(
        "messages",
        "message",
        "message.content",
        "message['role']",
        "tools",
        "loop.index",
        "bos_token",
    ),
    *(
        "add_generation_prompt",
        "undefined_name",
        "x",
        "namespace()",
        "range(9)",
        "cycler('a')",
        "self",
    ),
    *("messages[0].content", "messages | length", "strftime_now('%Y')", "message.tool_calls", "''"),
    *(
        "''.__class__",
        "().__class__.__bases__",
        "messages.append",
        "x.__init__.__globals__",
        "lipsum()",
    ),
)
FILTERS = (
    *(
        "trim",
        "tojson",
        "tojson(indent=4)",
        "upper",
        "length",
        "join(',')",
        "list",
        "first",
        "last",
    ),
    *("replace('a','bb')", "default('')", "string", "safe", "e", "items", "dictsort", "reverse"),
    *(
        "center(99999)",
        "indent(5000)",
        "wordwrap(1)",
        "truncate(3)",
        "format(1)",
        "batch(2)",
        "sum",
    ),
    *(
        "selectattr('role')",
        "map(attribute='content')",
        "groupby('role')",
        "unique",
        "sort",
        "pprint",
    ),
    *(
        "tojson(indent=999999999)",
        "join('x' * 99999)",
        "replace('', 'x' * 9999)",
        "urlize",
        "nosuch",
    ),
)
METHODS = (
    *(
        ".strip()",
        ".split('a')",
        ".upper()",
        ".startswith('x')",
        ".get('a')",
        ".items()",
        "[0]",
        "[::-1]",
    ),
    *(
        ".replace('a', 'b' * 999)",
        ".ljust(99999999)",
        ".center(2**40)",
        ".format(1)",
        ".zfill(10**9)",
    ),
    *(".join(['x'] * 9999)", ".encode()", ".expandtabs(10**9)", ".__len__()", "[999]", "['%s']"),
)
OPERATORS = ("+", "~", "*", "-", "/", "//", "%", "**", "==", "in", "and", "or", "<", "is", "not in")
NUMBERS = ("0", "1", "-1", "7", "99999", "10**9", "2**60", "1.5", "10**400", "true", "none")
MAX_DEPTH = 4


def grown_template(noise: random.Random) -> str:
    """Return the source of a template, seldom one that does not parse."""
    source = "".join(_statement(noise, 0) for _ in range(noise.randrange(1, 6)))
    if noise.random() < 0.1:
        broken = hostile.broken(source.encode("utf-8", "replace"), noise)
        return broken.decode("utf-8", "replace")
    return source


def _statement(noise: random.Random, depth: int) -> str:
    inner = _statement(noise, depth + 1) if depth < MAX_DEPTH else "x"
    match noise.randrange(9 if depth < MAX_DEPTH else 3):
        case 0:
            return f"{{{{ {_expression(noise)} }}}}"
        case 1:
            return noise.choice(("<|im_start|>", "\n", " ", hostile.text(noise)[:200]))
        case 2:
            return f"{{% set x = {_expression(noise)} %}}"
        case 3 | 4:
            source = noise.choice(("messages", "messages", "range(99)", "tools", "x"))
            if noise.random() < 0.01:  # up to the limit of time
                source = "range(10**8)"
            recursive = noise.choice(("", "", " if message", " recursive"))
            return f"{{% for message in {source}{recursive} %}}{inner}{{% endfor %}}"
        case 5:
            return f"{{% if {_expression(noise)} %}}{inner}{{% else %}}{inner}{{% endif %}}"
        case 6:
            called = noise.choice(("m(1)", "m()", "m(m)", "m(x=2)"))
            return f"{{% macro m(x) %}}{inner}{{{{ m(x) }}}}{{% endmacro %}}{{{{ {called} }}}}"
        case 7 if noise.random() < 0.05:  # up to the limit of time or memory
            loop = f"{{% for i in range(99) %}}{_doubled(noise)}{{% endfor %}}"
            return "{% set ns = namespace(a='x') %}" + loop
        case _:
            tag = noise.choice(
                ("filter upper", "block b", "call m(1)", "raw", "generation", "include 'x'")
            )
            return f"{{% {tag} %}}{inner}{{% end{tag.split()[0]} %}}"


def _doubled(noise: random.Random) -> str:
    grown = noise.choice(
        ("ns.a ~ ns.a", "ns.a + ns.a", "ns.a * 2", "[ns.a, ns.a]", "ns.a | tojson")
    )
    return f"{{% set ns.a = {grown} %}}"


def _expression(noise: random.Random, depth: int = 0) -> str:
    match noise.randrange(7 if depth < MAX_DEPTH else 3):
        case 0 | 1:
            return noise.choice(NAMES)
        case 2:
            return noise.choice(NUMBERS)
        case 3:
            return f"({_expression(noise, depth + 1)} | {noise.choice(FILTERS)})"
        case 4:
            return f"({_expression(noise, depth + 1)}){noise.choice(METHODS)}"
        case 5:
            left, right = _expression(noise, depth + 1), _expression(noise, depth + 1)
            return f"({left} {noise.choice(OPERATORS)} {right})"
        case _:
            return f"('{'x' * noise.choice((1, 99))}' % ({_expression(noise, depth + 1)},))"
