"""What a grammar forces, token by token."""

import numpy as np

from rekindle.generation.request import Grammar, GrammarKind
from rekindle.llama.grammar.compiler import GrammarCompiler
from rekindle.llama.grammar.matcher import Matcher
from rekindle.llama.tokenizer.vocabulary import Vocabulary

CALL = Grammar(
    GrammarKind.LARK,
    r"""start: "<call>{\"name\": \"" NAME "\", \"arguments\": {\"path\": \"" /[a-z]+/ "\"}}</call>"
NAME: "read_file" | "write_file"
""",
)


def allowed(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    logits = np.zeros(vocabulary.n_vocab, np.float32)
    matcher.apply(logits)
    return [int(token) for token in np.flatnonzero(logits == 0)]


def test_forced_tokens_are_the_only_ones_that_the_mask_allows(vocabulary: Vocabulary) -> None:
    matcher = GrammarCompiler(vocabulary).matcher(CALL)
    reply, n_forced = b"", 0
    for wish in b"wpath":  # where the grammar leaves a choice; then the model goes on as it likes
        while forced := matcher.forced_tokens():
            for token in forced:
                assert allowed(matcher, vocabulary) == [token]
                matcher.accept(token)
                reply += vocabulary.detokenize([token], render_special=False)
                n_forced += 1
        choice = vocabulary.tokenize_bytes(bytes([wish]))
        assert choice is not None
        matcher.accept_all(choice)
        reply += bytes([wish])
    assert reply == b'<call>{"name": "write_file", "arguments": {"path": "path'
    assert n_forced > 20


def test_forced_tokens_are_followed_or_found_anew(vocabulary: Vocabulary) -> None:
    matcher = GrammarCompiler(vocabulary).matcher(CALL)
    first, *others = matcher.forced_tokens()
    matcher.accept(first)
    assert matcher.forced_tokens() == others
    matcher.accept_all(others[:1])
    assert matcher.forced_tokens() == others[1:]
