"""Compiles grammars with llguidance, once each, and keeps those in use.

Any thread may call the compiler; the engine thread does not. Compiling runs without the GIL.
"""

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from hashlib import blake2b

import llguidance

from rekindle.bounded_cache import BoundedCache
from rekindle.errors import EngineError, InvalidRequest
from rekindle.generation.request import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from rekindle.llama.gbnf.lark import gbnf_to_lark
from rekindle.llama.grammar.matcher import Matcher, reason
from rekindle.llama.grammar.shortest_end import EndFinder
from rekindle.llama.grammar.tokenizer import GrammarTokenizer
from rekindle.llama.grammar.weight import MAX_SECONDS, fatal_number, is_light, weigh
from rekindle.llama.tokenizer.deep_stack import call_with_stack
from rekindle.llama.tokenizer.vocabulary import Vocabulary

TEXT_NEVER = b"\xff"  # llguidance's mark of a token that no plain text may produce

MAX_USED_BYTES = 128 * 2**20  # picked
MAX_CHECKED_BYTES = 64 * 2**20  # picked
STACK_BYTES = 16 * 2**20
STACK_PER_SOURCE_BYTE = 512  # up to 350 measured, for objects that contain each other
MAX_VERDICTS = 16_384  # picked
STEP_FUEL = 100_000  # of the lexer, for one token; llguidance allows twice as much; picked
# A property takes 4 items of a row. llguidance's own limit fails a reply with 500 properties.
MAX_ROW_ITEMS = 20_000  # `weight` refuses more than 2,100 properties

_Digest = bytes
_GOOD = ""


@dataclass(frozen=True, slots=True)
class _Compiled:
    matcher: llguidance.LLMatcher
    n_bytes: int  # about


class GrammarCompiler:
    """A grammar that is only checked evicts none that a reply has used.

    A check is often followed by a reply with the same grammar, so the last grammars checked are
    kept apart until then. A second check of any other one needs only the verdict on its source.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenize = GrammarTokenizer(vocabulary)
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()  # of everything below
        self._used = BoundedCache[_Digest, _Compiled](max_bytes=MAX_USED_BYTES)
        self._checked = BoundedCache[_Digest, _Compiled](max_bytes=MAX_CHECKED_BYTES)
        self._verdicts = BoundedCache[_Digest, str](max_items=MAX_VERDICTS)  # errors, or _GOOD
        self._compiling: dict[_Digest, Future[_Compiled]] = {}

    def prepare(self) -> None:
        """Make llguidance's tokenizer, so that the first grammar does not wait for it.

        Holds the GIL: 0.2 s with 49,152 tokens, about 1 s with 152,000. A second call is free.
        """
        self._llguidance_tokenizer()

    def is_quick(self, grammar: Grammar) -> bool:
        """Return whether the grammar is compiled, or compiles in a moment."""
        digest = _digest(grammar)
        with self._lock:
            if digest in self._used or digest in self._checked or self._verdicts.peek(digest):
                return True
        return is_light(grammar)

    def check(self, grammar: Grammar) -> None:
        """Compile the grammar unless it is known, and try its samples. Raises InvalidRequest."""
        digest = _digest(grammar)
        if not self._is_known_good(digest):
            self._compiled(digest, grammar)
        if grammar.samples:
            compiled = self._compiled(digest, grammar)
            for sample in grammar.samples:
                if not _accepts(compiled.matcher.deep_copy(), list(sample)):
                    text = self._vocabulary.detokenize(sample, render_special=True)
                    raise InvalidRequest(f"The grammar refuses {text.decode(errors='replace')!r}.")

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher in the grammar's first state. Raises InvalidRequest."""
        digest = _digest(grammar)
        self._is_known_good(digest)
        compiled = self._compiled(digest, grammar)
        with self._lock:
            self._checked.pop(digest)
            if digest not in self._used:
                self._used.put(digest, compiled, n_bytes=compiled.n_bytes)
        return Matcher(compiled.matcher.deep_copy(), self._vocabulary.n_vocab)

    def end_finder(self, grammar: Grammar) -> EndFinder:
        """Return what finds the ends of a grammar that has a `landing`."""
        return EndFinder(grammar, self._llguidance_tokenizer(), self._vocabulary)

    def _is_known_good(self, digest: _Digest) -> bool:
        """Return whether the source has been compiled. Raises InvalidRequest if it failed."""
        with self._lock:
            verdict = self._verdicts.get(digest)
        if verdict:
            raise InvalidRequest(verdict, "response_format")
        return verdict == _GOOD

    def _compiled(self, digest: _Digest, grammar: Grammar) -> _Compiled:
        """Return the compiled grammar. Compile it, or wait for another thread that does."""
        with self._lock:
            if known := self._used.get(digest) or self._checked.get(digest):
                return known
            others = self._compiling.get(digest)
            if others is None:
                own = self._compiling[digest] = Future()
        if others is not None:
            return others.result()
        verdict: str | None = None
        try:
            own.set_result(self._compile(grammar))
            verdict = _GOOD
        except _Refused as error:
            verdict = f"This {grammar.kind} cannot be used as a grammar: {error}"
            own.set_exception(InvalidRequest(verdict, "response_format"))
        except Exception as error:  # another try may succeed
            own.set_exception(error)
        with self._lock:
            del self._compiling[digest]
            if verdict is not None:
                self._verdicts.put(digest, verdict)
            if verdict == _GOOD:
                compiled = own.result()
                self._checked.put(digest, compiled, n_bytes=compiled.n_bytes)
        return own.result()

    def _compile(self, grammar: Grammar) -> _Compiled:
        n_bytes = len(grammar.source.encode())
        if n_bytes > MAX_GRAMMAR_BYTES:
            raise _Refused(f"it has {n_bytes:,} bytes; at most {MAX_GRAMMAR_BYTES:,} are accepted.")
        weight = weigh(grammar)
        if weight.seconds > MAX_SECONDS:
            raise _Refused(
                f"compiling it would take about {weight.seconds:,.0f} s, mostly for"
                f" {weight.heaviest}; at most {MAX_SECONDS:g} s are accepted."
            )
        if (number := fatal_number(grammar)) is not None:
            raise _Refused(f"the number {Decimal(number):.6g} in it is too small.")
        try:
            source = _source(grammar)
        except ValueError as error:  # faults of GBNF, JSON that is nested too deeply for llguidance
            raise _Refused(str(error)) from error
        compile_source = partial(
            llguidance.LLMatcher,
            self._llguidance_tokenizer(),
            source,
            log_level=0,
            limits=llguidance.LLParserLimits(
                max_items_in_row=MAX_ROW_ITEMS, step_lexer_fuel=STEP_FUEL
            ),
        )
        try:
            matcher = call_with_stack(compile_source, _stack_bytes(grammar.source))
        except MemoryError as error:
            raise EngineError("There is not enough memory to compile this grammar.") from error
        # Some faults, such as a schema with endless recursion, show at the first mask.
        first_step = matcher.deep_copy()
        first_step.compute_logit_bias()
        too_long = self._tokenize.take_refusal()
        if first_step.is_error():
            raise _Refused(too_long or reason(first_step))
        return _Compiled(matcher, weight.n_bytes)

    def _llguidance_tokenizer(self) -> llguidance.LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = llguidance.LLTokenizer.from_llamacpp(
                    tokens=self._vocabulary.pieces(control_mark=TEXT_NEVER),
                    vocab_ptr=self._vocabulary.handle,
                    tokenize_fptr=self._tokenize.pointer,
                    eos_token=sorted(self._vocabulary.eog_tokens),
                    slices=None,
                )
            return self._tokenizer


class _Refused(Exception):
    """llguidance cannot compile the source, now or later."""


def _digest(grammar: Grammar) -> _Digest:
    """Return a digest of the source. Grammars that differ only in `start` share a compilation."""
    return blake2b(f"{grammar.kind} {grammar.source}".encode(), digest_size=16).digest()


def _accepts(matcher: llguidance.LLMatcher, tokens: list[int]) -> bool:
    """Return whether the tokens are a whole text of the grammar."""
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def _stack_bytes(source: str) -> int:
    """Return the stack that compiling may take: llguidance follows references by recursion.

    Without them, JSON is nested 128 times at most. Each line is a schema of its own, or a rule.
    """
    if "$ref" not in source:
        return STACK_BYTES
    return STACK_BYTES + STACK_PER_SOURCE_BYTE * max(map(len, source.splitlines()))


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            # Without a bound on white space, a small model may emit line breaks for ever.
            source = llguidance.LLMatcher.grammar_from_json_schema(
                grammar.source, overrides={"whitespace_pattern": r"[ \n]?[ ]{0,8}"}
            )
        case GrammarKind.LARK:
            source = llguidance.LLMatcher.grammar_from_lark(grammar.source)
        case GrammarKind.GBNF:
            source = llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.source))
        case GrammarKind.REGEX:
            source = llguidance.LLMatcher.grammar_from_regex(grammar.source)
    return str(source)
