"""GBNF: at every step, the tokens are allowed that llama.cpp's own grammar allows."""

import random
from collections.abc import Iterator
from pathlib import Path

import llguidance
import numpy as np
import pytest

from rekindle.errors import InvalidRequest
from rekindle.generation.request import Grammar, GrammarKind
from rekindle.llama.gbnf.lark import gbnf_to_lark
from rekindle.llama.gbnf.parser import GbnfError
from rekindle.llama.grammar.compiler import GrammarCompiler
from rekindle.llama.library import lib
from rekindle.llama.model import GgufModel
from rekindle.llama.sampling.candidates import Candidates
from rekindle.llama.tokenizer.vocabulary import Vocabulary

SUMS = r"""
# sums of names and numbers, one on each line
root ::= (sum "=" ws part "\n")+
sum  ::= part ([-+*/] part)*
part ::= name | number | "(" ws sum ")" ws
name ::= [a-z] [a-z0-9_]* ws
number ::= [0-9]+ ws
ws ::= [ \t\n]*
"""
SHOPPING = r"""
root ::= item{1,3}
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""
MOVES = r"""
root ::= "1. " move " " move "\n" ([2-9] ". " move (" " move)? "\n")*
move ::= (pawn | piece | castle) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBQR])?
castle ::= "O-O" "-O"?
"""
JSON = r"""
root ::= object
value ::= object | list | text | number | ("true" | "false" | "null") ws
object ::= "{" ws (text ":" ws value ("," ws text ":" ws value)*)? "}" ws
list ::= "[" ws (value ("," ws value)*)? "]" ws
text ::= "\"" ([^"\\\x7f\x00-\x1f] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
CODE = r"""
root ::= (type " " name "(" (type " " name ("," " "? type " " name)*)? ") {" line* "\n}")+
type ::= "int" | "char" | "float"
name ::= [a-zA-Z_] [a-zA-Z_0-9]*
line ::= "\n " (name " = " value ";" | "while (" value " < " value ") {" line* "\n }")
value ::= name | [0-9]+ | "(" value ([-+] value)* ")" | name "(" value? ")"
"""
KANA = 'root ::= kana+ ([ \\t] kana+)* "。"\nkana ::= [ぁ-ゟ] | [ァ-ヿ] | [一-龯]'
TIGHT = r"""
root ::= word "a" rest? | "ab" "d" | "a" "bc" root
word ::= [a-z]+
rest ::= "(" root ")"
"""
GRAMMARS = {
    "sums": SUMS,
    "shopping": SHOPPING,
    "moves": MOVES,
    "json": JSON,
    "code": CODE,
    "kana": KANA,
    "lexemes that overlap": TIGHT,
}


@pytest.fixture(scope="module")
def vocabulary(embedded_model: Path) -> Iterator[Vocabulary]:
    model = GgufModel(embedded_model, gpu_layers=0)
    yield model.vocabulary
    model.close()


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(vocabulary)


def allowed_by_llama_cpp(sampler: object, candidates: Candidates, n_vocab: int) -> set[int]:
    candidates.fill(np.zeros(n_vocab, dtype=np.float32))
    candidates.apply(sampler)
    return {int(t) for t in candidates.tokens[candidates.logits > -np.inf]}


def is_text(vocabulary: Vocabulary, token: int) -> bool:
    try:
        vocabulary.detokenize([token], render_special=True).decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_same_tokens_are_allowed_as_in_llama_cpp(
    compiler: GrammarCompiler, vocabulary: Vocabulary, name: str
) -> None:
    source, n_vocab = GRAMMARS[name], vocabulary.n_vocab
    # Control tokens have no text here; in llama.cpp their names may match. It refuses a zero byte.
    pieces = [vocabulary.detokenize([t], render_special=False) for t in range(n_vocab)]
    plain = {token for token, piece in enumerate(pieces) if piece and piece[0]}
    plain |= vocabulary.eog_tokens
    theirs = lib.llama_sampler_init_grammar(vocabulary.handle, source.encode(), b"root")
    ours = compiler.matcher(Grammar(GrammarKind.GBNF, source))
    candidates, noise = Candidates(n_vocab), random.Random(3)
    for step in range(25):
        expected = allowed_by_llama_cpp(theirs, candidates, n_vocab) & plain
        row = np.zeros(n_vocab, dtype=np.float32)
        ours.apply(row)
        found = set(np.flatnonzero(row == 0).tolist()) & plain
        assert expected <= found, step
        # llama.cpp refuses a part of a character if a set excludes any of its continuations.
        assert not [t for t in found - expected if is_text(vocabulary, t)], step
        if not (going_on := sorted(expected - vocabulary.eog_tokens)):
            break
        token = noise.choice(going_on)
        lib.llama_sampler_accept(theirs, token)
        ours.accept(token)
    lib.llama_sampler_free(theirs)


BYTES = llguidance.LLTokenizer("byte")


def matches(source: str, text: str) -> bool:
    lark = llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(source))
    matcher = llguidance.LLMatcher(BYTES, lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        (SUMS, ["x +3 = y\n", "(a *b )=c\nd= 1\n\n"], ["x +3 = y", "x + = y\n"]),
        (SHOPPING, ["- milk\n", "- a\n- b\n- c\n"], ["- a\n- b\n- c\n- d\n", "milk\n"]),
        (MOVES, ["1. e4 e5\n", "1. e4 e5\n2. Nf3 Nc6\n3. O-O\n"], ["1. e4\n", "1. e9 e5\n"]),
        (JSON, ['{"a": [1, -2.5e3, null], "\\u00e9": {}}'], ['{"a": [1,]}', "[]", '{"a" 1}']),
        (CODE, ["int f() {\n x = (a+b);\n while (x < 9) {\n x = g(x);\n }\n}"], ["int f() {}"]),
        (KANA, ["ひらがな カタカナ。"], ["ひらがな"]),
        (TIGHT, ["ba", "abd", "abcabd", "xa(abd)"], ["b", "xa(b"]),
        ('root ::= [a-z]+ "a"', ["xyza", "aa"], ["a", "xyz"]),
        ("root ::= .", ["\n", "é", "\U0001f600"], ["", "ab"]),
        ('root ::= "\\x41\\u00e9\\U0001F600\\t"', ["Aé\U0001f600\t"], ["A"]),
        ('root ::= start\nstart ::= "a" # the end\n', ["a"], ["b"]),
        ('root ::= "a" |\n  "b"', ["a", "b"], [""]),
        ('root ::= ("a"\n | "b")? "c"', ["ac", "c"], ["a"]),
        ('root ::= "a"{2} "b"{1,} "c"{0,2}', ["aab", "aabbbcc"], ["ab", "aabccc"]),
        ("root ::= [^a-c\\]] [-x] [x-]", ["d-x", "[x-"], ["a-x", "]-x"]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= ("(" root ")")?', ["", "(())"], ["(", "())"]),
        ('root ::= x x\nx ::= "a" | "a" "a"', ["aa", "aaa", "aaaa"], ["a", "aaaaa"]),
    ],
)
def test_texts_are_those_of_the_grammar(source: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not matches(source, text)] == []
    assert [text for text in bad if matches(source, text)] == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "no rule `root`"),
        ('a ::= "x"', "no rule `root`"),
        ("root ::= a", "`root` refers to `a`"),
        ('root = "a"', "line 1: `::=` is expected, at '= \"a\"'"),
        ('# ok\nroot ::= "a" )', "line 2: the end of the rule is expected, at ')'"),
        ('root ::= "abc', "ends inside quotes"),
        ("root ::= [a", "ends inside quotes or brackets"),
        ('root ::= ("a"', "`)` is expected"),
        ("root ::= *", "nothing to repeat"),
        ('root ::= "a"{3,2}', "ascending"),
        ('root ::= "a"{9999}', "at most 2,000"),
        ('root ::= "a"{x}', "`{m}`"),
        ('root ::= "\\q"', "`\\q` is not an escape"),
        ('root ::= "\\u12"', "4 hexadecimal digits"),
        ("root ::= [z-a]", "ends before it begins"),
        ("root ::= <think>", "tokens in a grammar"),
        ("root ::= " + "(" * 200, "nested"),
        ("root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(9_000)), "r9000"),
    ],
)
def test_a_grammar_with_a_fault_says_what_and_where(source: str, says: str) -> None:
    with pytest.raises(GbnfError) as refused:
        gbnf_to_lark(source)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "source",
    [
        'root ::= "a" (' + " | ".join(f'"w{i}" root' for i in range(3_000)) + ")?",
        "root ::= " + " ".join(f'("{i}" root)?' for i in range(3_000)),
    ],
)
def test_a_grammar_that_would_take_long_is_refused(source: str) -> None:
    with pytest.raises(GbnfError, match="complex"):
        gbnf_to_lark(source)


def test_a_fault_is_the_clients_error(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match="line 1: `::=` is expected"):
        compiler.check(Grammar(GrammarKind.GBNF, "root : a"))
