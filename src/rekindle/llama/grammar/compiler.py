"""Constrained output: llguidance compiles a grammar once, and masks the logits at each token.

Compiling a large schema may take a second, so it runs in the caller's thread
(`Engine.check_grammar`). The engine thread then only copies the compiled matcher.
"""

import threading

import llguidance
import numpy as np
from numpy.typing import NDArray

from rekindle.bounded_cache import BoundedCache
from rekindle.errors import EngineError, InvalidRequest
from rekindle.generation.request import Grammar, GrammarKind
from rekindle.llama.grammar.tokenizer import GrammarTokenizer
from rekindle.llama.tokenizer.vocabulary import Vocabulary

TEXT_NEVER = b"\xff"  # llguidance's mark of a token that no plain text may produce
MAX_COMPILED = 64  # agents reuse a handful of schemas; picked


class Matcher:
    """The state of one reply under its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, n_vocab: int) -> None:
        self._matcher = matcher
        self._n_vocab = n_vocab
        self._mask = np.empty((n_vocab + 31) // 32, dtype=np.int32)

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Set the logits of forbidden tokens to -inf, in place."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():
            raise EngineError(f"The grammar engine failed: {_reason(self._matcher)}")
        allowed = np.unpackbits(self._mask.view(np.uint8), count=self._n_vocab, bitorder="little")
        np.putmask(logits, allowed == 0, -np.inf)

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise EngineError(f"The grammar engine failed: {_reason(self._matcher)}")

    def try_accept(self, tokens: list[int]) -> bool:
        """Accept all tokens or none. Call it only at the beginning."""
        if self._matcher.try_consume_tokens(tokens) == len(tokens):
            return True
        self._matcher.reset()
        return False


class GrammarCompiler:
    """Keeps the most recently used compiled grammars. Any thread may call it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenize = GrammarTokenizer(vocabulary)
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None  # takes 0.1 to 1 s: on first use
        self._compiled = BoundedCache[tuple[GrammarKind, str], llguidance.LLMatcher](
            max_items=MAX_COMPILED
        )

    def matcher(self, grammar: Grammar) -> Matcher:
        return Matcher(self.check(grammar).deep_copy(), self._vocabulary.n_vocab)

    def check(self, grammar: Grammar) -> llguidance.LLMatcher:
        """Return the compiled grammar, in its first state. Raises InvalidRequest."""
        key = (grammar.kind, grammar.source)
        with self._lock:
            if (known := self._compiled.get(key)) is not None:
                return known
            if self._tokenizer is None:
                self._tokenizer = llguidance.LLTokenizer.from_llamacpp(
                    tokens=self._vocabulary.pieces(control_mark=TEXT_NEVER),
                    vocab_ptr=self._vocabulary.handle,
                    tokenize_fptr=self._tokenize.pointer,
                    eos_token=sorted(self._vocabulary.eog_tokens),
                    slices=None,
                )
            tokenizer = self._tokenizer
        matcher = llguidance.LLMatcher(tokenizer, _source(grammar), log_level=0)
        # Some faults, such as a schema with endless recursion, show at the first mask.
        first_step = matcher.deep_copy()
        first_step.compute_logit_bias()
        refusal = self._tokenize.take_refusal()
        if first_step.is_error():
            raise InvalidRequest(
                f"This {grammar.kind} cannot be used as a grammar:"
                f" {refusal or _reason(first_step)}",
                "response_format",
            )
        with self._lock:
            self._compiled.put(key, matcher)
        return matcher


def _reason(matcher: llguidance.LLMatcher) -> str:
    """Return llguidance's error without the dump of its state."""
    return " ".join(matcher.get_error().split("<state>")[0].split())


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            # Without a bound on white space, a small model may emit line breaks for ever.
            source = llguidance.LLMatcher.grammar_from_json_schema(
                grammar.source, overrides={"whitespace_pattern": r"[ \n]?[ ]{0,8}"}
            )
        case GrammarKind.LARK:
            source = llguidance.LLMatcher.grammar_from_lark(grammar.source)
        case GrammarKind.REGEX:
            source = llguidance.LLMatcher.grammar_from_regex(grammar.source)
    return str(source)
