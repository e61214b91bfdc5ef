"""Templates that would run for minutes or fill the memory, and long ones that may go on."""

import threading
import tracemalloc

import pytest

from rekindle.chat.conversation import Conversation, Message, Role, Text
from rekindle.chat.template import budget, sandbox
from rekindle.chat.template.guard import Guard
from rekindle.chat.template.template import CHATML, ChatTemplate
from rekindle.errors import InvalidRequest, StartupError
from rekindle.models.chat_setup import with_dialect

STATE = "{% set ns = namespace(x='x', l=[1], i=3) %}"
LOOP, END = "{% for i in range(99999) %}", "{% endfor %}"


def render(source: str, text: str = "go") -> str:
    """Render the source for a text that begins with `go`. Any other text is shown as it is."""
    is_go = "{% if messages[0].content[:2] == 'go' %}"
    guarded = is_go + source + "{% else %}{{ messages[0].content }}{% endif %}"
    template = ChatTemplate(guarded, bos_text="", eos_text="", guard=Guard(("<|im_end|>",)))
    conversation = Conversation((Message(Role.USER, (Text(text),)),))
    return "".join(p.text for p in template.render(conversation, add_generation_prompt=True))


@pytest.mark.parametrize(
    "source",
    [
        LOOP * 3 + END * 3,
        LOOP * 2 + "{% set ns = namespace() %}" + END * 2,
        LOOP + "{% for i in range(99999) if i < 0 %}{% endfor %}" + END,
        STATE + LOOP * 2 + "{% set ns.l = [ns.l, i] %}" + END * 2,
        "{% set l = [] %}" + LOOP * 2 + "{% set _ = l.append(i) %}" + END * 2,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(99) }}",
        LOOP + "{{ range(99999) | map('string') | select('equalto', 'x') | list }}" + END,
    ],
)
def test_a_template_that_runs_too_long_is_stopped_and_its_thread_is_free(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "MAX_SECONDS", 0.3)
    refusals = []

    def work() -> None:
        with pytest.raises(InvalidRequest) as caught:
            render(source)
        refusals.append(caught.value.message)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert refusals == [
        "The chat template refused this conversation: rendering takes more than 0.3 seconds"
    ]


GROWING = [
    "{% set ns.x = ns.x ~ ns.x %}",
    "{% set ns.x = ns.x + ns.x %}",
    "{% set ns.l = ns.l + ns.l %}",
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}",
    "{% set ns.l = [ns.l, ns.l] %}",
    "{% set ns.l = (ns.l, ns.l) %}",
    "{% set ns.l = {'a': ns.l, 'b': ns.l} %}",
    "{% set ns.l = {'a': ns.l, 'b': ns.l}.values() %}",
    "{% set ns.l = dict(a=ns.l, b=ns.l) %}",
    "{% set ns.l = [ns.l, ns.l] | batch(2) | list %}",
    "{% set c = [] %}{% set _ = c.append(ns.l) %}{% set _ = ns.l.append(c) %}",
    "{% set ns.l = [('y' * 1000000)[i:], ns.l] %}",
    "{% set ns.l = ns.l + ['y' * 1000000 ~ i] %}",
    "{% set ns.i = ns.i * ns.i %}",
    "{% set ns.i = ns.i ** 64 %}",
    "{{ 'y' * 1000000 }}",
    "a long text " * 100,
]


@pytest.mark.parametrize("body", GROWING)
def test_a_value_that_grows_in_a_loop_has_a_limit(body: str) -> None:
    with pytest.raises(InvalidRequest, match=r"Mi characters|too large"):
        render(STATE + LOOP + body + END)


@pytest.mark.parametrize(
    "expression",
    [
        "'%1000000000d' % 1",
        "'%*d' % (1000000000, 1)",
        "('%9999d' * 9000) % ((1,) * 9000)",
        "strftime_now('%9999Y' * 1000)",
        "'%.1000000000f' % 1",
        "'%(a)1000000000d' % {'a': 1}",
        "('%s' * 100000) % (('x' * 100000,) * 100000)",
        "'%1000000000d' | format(1)",
        "'{:1000000000}'.format(1)",
        "'{:{}}'.format(1, 1000000000)",
        "'{a:1000000000}'.format_map({'a': 1})",
        "('{0}' * 100000).format('x' * 100000)",
        "'x' | center(1000000000)",
        "['x'] | map('center', 1000000000) | list",
        "'x'.ljust(1000000000)",
        "'x'.zfill(1000000000)",
        "('\\t' * 100000).expandtabs(tabsize=1000000000)",
        "(['a'] * 100000) | join('x' * 100000)",
        "('x' * 100000).join(['a'] * 100000)",
        "range(99999) | map('string') | join('x' * 100000)",
        "('a' * 100000) | replace('a', 'x' * 100000)",
        "('a' * 100000)['replace']('a', 'x' * 100000)",
        "('a' * 100000).translate({97: 'x' * 100000})",
        "('\\n' * 100000) | indent(1000000000)",
        "('\\n' * 100000) | indent('x' * 100000)",
        "[1] | tojson(indent=1000000000)",
        "[1] | tojson(indent='x' * 1000000)",
        "([1] * 99999) | tojson(indent=9999)",
        "([1] * 99999) | tojson(separators=('x' * 9000, ':'))",
        "[1] | batch(1000000000, 0) | list",
        "[1] | slice(1000000000) | list",
        "2 | round(1000000000, 'floor')",
        "1000000000 * 'x'",
        "[1] * 1000000000",
        "([[1]] * 1000) | sum(start=[])",
        "(1).to_bytes(1000000000, 'big')",
        "('x' * 1000000 ~ 'x' * 100000) | list",
        "lipsum(n=1000000000)",
    ],
)
def test_no_single_call_makes_a_huge_value(expression: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="The chat template refused"):
            render("{{ " + expression + " }}")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 256 * 2**20  # it is refused before it is made


def test_arguments_of_a_macro_that_hold_each_other_have_a_limit() -> None:
    macro = "{% macro f() %}{% if varargs %}{{ f(varargs, varargs) }}{% endif %}{% endmacro %}"
    with pytest.raises(InvalidRequest, match="Mi characters"):
        render(macro + "{{ f(1) }}")


def test_namespaces_that_hold_each_other_are_written_in_one_word() -> None:
    nested = "{% for i in range(99) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}"
    assert render(STATE + nested + "{{ ns.x }}") == "<Namespace>"


def test_values_that_are_no_longer_used_do_not_count() -> None:
    # 1,000 texts of 1 MB, one after the other: four times the memory that may be in use.
    body = "{% for i in range(1000) %}{% set ns.x = 'y' * 999999 ~ i %}{% endfor %}"
    assert render(STATE + body + "{{ ns.x[-3:] }}") == "999"


def test_a_text_as_long_as_the_longest_body_is_rendered() -> None:
    text = "go" + " word" * (32 * 2**20 // 5)
    assert len(render("{{ '[' ~ messages[0].content.strip() + ']' }}", text)) == len(text) + 2


def test_a_template_that_never_ends_is_refused_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_SECONDS", 0.3)
    with pytest.raises(StartupError, match="seconds to render a few words"):
        ChatTemplate(LOOP * 3 + END * 3, bos_text="", eos_text="", guard=Guard(()))


def test_constants_are_not_computed_while_a_template_compiles() -> None:
    source = "{% if false %}{{ '%1000000000d' % 1 }}{{ 'x' | center(1000000000) }}{% endif %}fine"
    assert render(source) == "fine"


TEXT = "{% set ns = namespace(x='WORD' * 100000) %}"
DOUBLED = "{% for i in range(6) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


@pytest.mark.parametrize(
    ("word", "expression"),
    [
        ("\u0390aaaa", "ns.x.upper()"),
        ("\u0390aaaa", "ns.x | upper"),
        ("a b c ", "ns.x | title"),
        ("\u00e9\u00e9", "ns.x | tojson(ensure_ascii=true)"),
    ],
)
def test_a_long_text_is_not_made_longer_than_the_limit(
    word: str, expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "MAX_CHARACTERS", 40_000_000)
    with pytest.raises(InvalidRequest, match=r"characters|than 10 seconds"):
        render(TEXT.replace("WORD", word) + DOUBLED + "{{ " + expression + " | length }}")


def test_json_with_an_indent_or_short_separators_stays_as_it_was() -> None:
    assert render("{{ {'a': [1]} | tojson(indent=1) }}") == '{\n "a": [\n  1\n ]\n}'
    assert render("{{ {'a': [1, 2]} | tojson(separators=(',', ':')) }}") == '{"a":[1,2]}'
    assert render("{{ '\u00e9x\U0001f600' | tojson(ensure_ascii=true) }}") == (
        '"\\u00e9x\\ud83d\\ude00"'
    )


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("x" * 50 * 2**20, "52,428,800 characters; at most 262,144"),
        ("{{ [" + "1," * 100_000 + "] }}", "more than 20,000 words and signs"),
        ("{% macro m() %}{% endmacro %}" * 8_000, "more than 20,000 words and signs"),
    ],
)
def test_a_template_that_takes_long_to_compile_is_refused_at_load(source: str, why: str) -> None:
    with pytest.raises(StartupError, match=why):
        ChatTemplate(source, bos_text="", eos_text="", guard=Guard(()))


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 90_000 + "1" + ")" * 90_000 + " }}",
        "{% if x %}" * 5_000 + "{% endif %}" * 5_000,
        "{{ x" + "|string" * 6_000 + " }}",
        "{% if x %}" + "{% elif x %}" * 4_000 + "{% endif %}",
    ],
)
def test_a_template_that_is_nested_too_deep_is_refused_at_load(source: str) -> None:
    with pytest.raises(StartupError, match=r"does not (parse|compile)"):
        ChatTemplate(source, bos_text="", eos_text="", guard=Guard(()))


def test_a_reason_to_refuse_has_a_limit() -> None:
    with pytest.raises(InvalidRequest) as caught:
        render("{{ raise_exception('x' * 1000000) }}")
    assert len(caught.value.message) < 1_100


def test_the_search_for_a_dialect_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rendering is short; there are many of them."""
    made = []

    class Counted(budget.Budget):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(sandbox, "Budget", Counted)
    with_dialect(CHATML, None, None)
    assert len(made) == 2  # the probes at load, and the search
