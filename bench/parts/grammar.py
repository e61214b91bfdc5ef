"""Measure a grammar per token: llguidance, as the server uses it, and llama.cpp's own.

python -m bench.parts.grammar
"""

import ctypes
import json
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
from rich.console import Console

from bench.engine_run import timed
from rekindle.generation.request import Grammar, GrammarKind
from rekindle.llama.grammar.compiler import GrammarCompiler
from rekindle.llama.library import lib
from rekindle.llama.model import GgufModel
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from rekindle.models.source import resolve_model

TEXT = json.dumps(
    {"name": "A cat called Tom", "tags": ["one", "two"], "nested": {"x": [1, 2], "y": "more text"}}
)
GBNF = r"""
root   ::= object
value  ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws ( string ":" ws value ws ( "," ws string ":" ws value ws )* )? "}"
array  ::= "[" ws ( value ws ( "," ws value ws )* )? "]"
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" ["\\bfnrt/] )* "\""
number ::= "-"? [0-9]+ ( "." [0-9]+ )?
ws     ::= [ \n]?
"""


def main() -> None:
    model = GgufModel(resolve_model(None).path, gpu_layers=0)
    tokens = model.vocabulary.tokenize(TEXT, parse_special=False)
    console = Console()
    for name, step in (
        ("llguidance", _llguidance_step(model.vocabulary)),
        ("llama.cpp", _llama_step(model.vocabulary)),
    ):
        times = [timed(partial(step, token))[1] for token in tokens]
        console.print(
            f"{name}: {median(times) * 1e6:,.0f} us per token, at most {max(times) * 1e6:,.0f}"
        )


def _llguidance_step(vocabulary: Vocabulary) -> Callable[[int], None]:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
    matcher = GrammarCompiler(vocabulary).matcher(grammar)
    logits = np.zeros(vocabulary.n_vocab, dtype=np.float32)

    def step(token: int) -> None:
        logits[:] = 0
        matcher.apply(logits)
        assert np.isfinite(logits[token])
        matcher.accept(token)

    return step


def _llama_step(vocabulary: Vocabulary) -> Callable[[int], None]:
    sampler = lib.llama_sampler_init_grammar(vocabulary.handle, GBNF.encode(), b"root")
    n_vocab = vocabulary.n_vocab
    candidates = (lib.llama_token_data * n_vocab)()
    rows = np.frombuffer(
        memoryview(candidates), dtype=[("token", "i4"), ("logit", "f4"), ("p", "f4")]
    )
    rows["token"] = np.arange(n_vocab)

    def step(token: int) -> None:
        rows["logit"] = 0
        is_sorted = False
        array = lib.llama_token_data_array(candidates, n_vocab, -1, is_sorted)
        lib.llama_sampler_apply(sampler, ctypes.byref(array))
        assert np.isfinite(rows["logit"][token])
        lib.llama_sampler_accept(sampler, token)

    return step


if __name__ == "__main__":
    main()
