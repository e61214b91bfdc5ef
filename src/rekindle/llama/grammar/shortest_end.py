"""Finds a short text that completes a grammar from any state, as tokens.

The search walks a copy of the matcher, byte by byte, and takes the first choice that ends
something: it is greedy, so its time grows with the length of the end.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import llguidance

from rekindle.generation.request import Grammar
from rekindle.llama.tokenizer.vocabulary import Vocabulary

# Questions to the matcher in one search, 1 to 5 us each. A longer search finds nothing. Picked:
# enough for 100 required members.
MAX_QUESTIONS = 10_000
TRIAL_QUESTIONS = 1_000  # in the trial of one alternative; picked
ALL_TRIALS = 4 * TRIAL_QUESTIONS  # in all trials of a search; picked
MAX_FILLER = 64  # characters at once; picked
MAX_TRIED = 4  # alternatives at one place; picked
MAX_HINTS = 512  # of each kind; picked

_SUFFIX = re.compile(r'\[suffix=("(?:[^"\\]|\\.)*")\]')
_LEAD = re.compile(r'("(?:[^"\\]|\\.)+") <\[\d+\]>')
_CONTROL = re.compile(r"<\[(\d+)\]>")


def _single(text: Iterable[int]) -> list[bytes]:
    return [bytes([byte]) for byte in text]


# Where all of these may follow, any text may: the matcher is inside a string or raw text.
_ANY_TEXT = _single(b"aZ7 ")
_QUOTES = _single(b"\"'`\n")  # each may end free text
_ENDS = _single(b"}])\"'")  # of a list, an object, a string: the first that may follow is taken
_MARKS = _single(b",:<>{[(=|/;#!%&*?@^`~")
_OPENINGS = _single(b"{[(")  # a value inside may need another one, and so on for ever
_LITERALS = _single(b"nN0tTfF")  # null, None, a number and so on
_VALUE_ENDS = _single(b"}])\"',<\n")
_SPACES = _single(b" \n")
# Numbers and words have no natural end, so they come last.
_WORDS = _single(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_$.+-\\")
_OTHERS = _single(b" \n\r\t") + _single(range(0x80, 0x100))

_TOKEN_MARK = b"\xff"  # in forced bytes, a control token is this mark and its id in brackets

Step = bytes | int  # text, or a control token


class _Hints(NamedTuple):
    """Strings of a grammar that are worth trying, so that no mask has to be searched."""

    closings: tuple[bytes, ...]  # each ends a raw text
    control_tokens: tuple[int, ...]
    leads: tuple[bytes, ...]  # texts before a control token
    names: tuple[bytes, ...]  # of required members
    first_bytes: tuple[bytes, ...]  # of these names


class EndFinder:
    """Finds ends of one grammar. The results depend on the matcher's state alone."""

    def __init__(
        self, grammar: Grammar, tokenizer: llguidance.LLTokenizer, vocabulary: Vocabulary
    ) -> None:
        self._tokenizer = tokenizer
        self._byte_tokens = [vocabulary.tokenize_bytes(bytes([byte])) for byte in range(256)]
        self._hints = _hints(grammar)

    def find(self, matcher: llguidance.LLMatcher) -> list[int] | None:
        """Return tokens after which the grammar accepts the end; None: none were found.

        The matcher does not change.
        """
        steps = _Walk(matcher.deep_copy(), self._hints, self._byte_tokens).steps()
        if steps is None:
            return None
        for as_tokens in (self._cut_long, self._cut_short):
            path = _joined(steps, as_tokens)
            if completes(matcher, path):
                return path
        return None

    def _cut_long(self, text: bytes) -> list[int]:
        try:
            return list(self._tokenizer.greedy_tokenize(text.decode()))
        except UnicodeDecodeError:  # it begins inside a character
            return self._cut_short(text)

    def _cut_short(self, text: bytes) -> list[int]:
        return [token for byte in text for token in self._byte_tokens[byte] or ()]


def completes(matcher: llguidance.LLMatcher, tokens: list[int]) -> bool:
    """Return whether the grammar accepts the end after these tokens. The matcher stays."""
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    after = matcher.deep_copy()
    return bool(after.consume_tokens(tokens) and after.is_accepting())


class _Walk:
    """One walk to the end of a grammar. The walk changes its matcher."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        hints: _Hints,
        byte_tokens: list[list[int] | None],  # None: no token has that byte
        *,
        n_questions: int = MAX_QUESTIONS,
        n_trial_questions: int = ALL_TRIALS,
    ) -> None:
        self._matcher = matcher
        self._hints = hints
        self._byte_tokens = byte_tokens
        self._n_left = n_questions
        self._n_trial_left = n_trial_questions
        self._n_named = 0  # names up to the last one that was written
        self._n_filler = 1
        self._letter = b""  # the last steps are this letter or digit, chosen far from any end
        self._n_chosen = 0  # how often
        self._is_repeated = False  # the last step is many of these letters
        self._may_be_closing = True  # the free text may end with a part of its closing mark

    def steps(self) -> list[Step] | None:
        steps: list[Step] = []
        while self._n_left > 0:
            if self._matcher.is_accepting():
                return steps
            step = self._forced() or self._chosen()
            if step is None or not self._matcher.consume_tokens(self._tokens(step)):
                return None
            steps.append(step)
            if isinstance(step, int) or not self._letter or step.strip(self._letter):
                self._letter, self._n_chosen, self._is_repeated = b"", 0, False
            self._may_be_closing = False
        return None

    def _forced(self) -> Step | None:
        """Return the text or the control token that has to follow."""
        text, mark, rest = self._matcher.compute_ff_bytes().partition(_TOKEN_MARK)
        if not text and not mark:
            return None
        step: Step = text or int(rest[1 : rest.index(b"]")])
        return step if self._allows(step) else None

    def _chosen(self) -> Step | None:
        if self._is_free():
            return self._closing() or self._filler()
        self._n_filler = 1
        end = next(filter(self._allows, _ENDS), None)
        if end is not None:
            return end
        marks: list[Step] = [
            *filter(self._allows, self._hints.control_tokens),
            *filter(self._allows, _MARKS),
        ]
        spaces = list(filter(self._allows, _SPACES))
        ending = next((each for each in spaces if self._after(each, self._may_end)), None)
        if ending is not None:
            return ending
        marks += [each for each in spaces if self._after(each, self._binds)]
        return (
            self._literal(marks)
            or self._best(marks)
            or self._required_name()
            or self._word()
            or self._shortest(_OTHERS)
        )

    def _is_free(self) -> bool:
        return all(map(self._allows, _ANY_TEXT))

    def _closing(self) -> Step | None:
        """Return what ends the free text; None: it may not end yet."""
        ends: list[Step] = [*_QUOTES, *self._hints.control_tokens]
        closing = next(filter(self._closes, ends), None)
        if closing is not None:
            return closing
        for mark in self._hints.closings:
            first = len(mark) - 1 if self._may_be_closing else 0
            for start in range(first, -1, -1):
                if self._closes(mark[start:]):
                    return mark[start:]
        for lead in self._hints.leads:
            if self._allows(lead) and self._after(lead, self._leads_out):
                return lead
        return None

    def _leads_out(self) -> bool:
        return any(map(self._closes, self._hints.control_tokens))

    def _filler(self) -> bytes:
        """Return text for a string that may not end yet: more each time, for long ones."""
        self._n_filler = min(2 * self._n_filler, MAX_FILLER)
        text = _ANY_TEXT[0] * self._n_filler
        return text if self._allows(text) else _ANY_TEXT[0]

    def _closes(self, step: Step) -> bool:
        return self._allows(step) and bool(self._after(step, self._is_bound))

    def _is_bound(self) -> bool:
        return self._matcher.is_accepting() or not self._is_free()

    def _required_name(self) -> bytes | None:
        """Return the name of a member that may follow here. The last one comes last."""
        names = self._hints.names
        first = {each for each in self._hints.first_bytes if self._allows(each)}
        for name in (*names[self._n_named :], *names[: self._n_named]):
            if name[:1] in first and self._allows(name) and self._after(name, self._ends_a_word):
                self._n_named = names.index(name) + 1
                return name
        return None

    def _literal(self, marks: list[Step]) -> Step | None:
        """Return what begins a short value where otherwise only a nested one may begin."""
        if not marks or any(mark not in _OPENINGS for mark in marks):
            return None
        begins = [each for each in _LITERALS if self._allows(each)]
        return min(begins, key=lambda each: self._after(each, self._n_to_end), default=None)

    def _word(self) -> Step | None:
        """Return the next letter or digit. A long run of one class is filled, more each time."""
        if self._n_chosen > 1 and not self._is_repeated:
            n_letters = min(1 << (self._n_chosen - 1), MAX_FILLER)
            while n_letters > 1:
                if self._allows(self._letter * n_letters):
                    self._is_repeated = True
                    return self._letter * n_letters
                n_letters //= 2
        step = self._shortest(_WORDS)
        if isinstance(step, bytes) and self._after(step, self._n_to_end) == MAX_QUESTIONS:
            self._n_chosen = self._n_chosen + 1 if step == self._letter else 1
            self._letter, self._is_repeated = step, False
        return step

    def _shortest(self, candidates: Iterable[bytes]) -> Step | None:
        """Return the candidate that decides the least text after it."""
        allowed = list(filter(self._allows, candidates))
        if len(allowed) < 2:
            return allowed[0] if allowed else None
        allowed.sort(key=lambda each: self._after(each, self._n_to_end))
        # Half of the trials are for marks: the wrong one may begin another call for ever.
        is_tried = len(allowed) <= MAX_TRIED and self._n_trial_left > ALL_TRIALS // 2
        return self._best(allowed) if is_tried else allowed[0]

    def _best(self, alternatives: Sequence[Step]) -> Step | None:
        """Return the alternative with the shortest end, or the first if no end is near."""
        if not alternatives:
            return None
        best, shortest = alternatives[0], -1
        for step in alternatives[:MAX_TRIED] if len(alternatives) > 1 else ():
            if self._n_trial_left <= 0:
                break
            trial = _Walk(
                self._matcher.deep_copy(),
                self._hints,
                self._byte_tokens,
                n_questions=TRIAL_QUESTIONS,
                n_trial_questions=0,
            )
            trial._matcher.consume_tokens(self._tokens(step))
            steps = trial.steps()
            self._n_trial_left -= TRIAL_QUESTIONS - trial._n_left
            length = sum(map(_length, steps or ()))
            if steps is not None and (shortest < 0 or length < shortest):
                best, shortest = step, length
        return best

    def _ends_a_word(self) -> bool:
        return not self._matcher.compute_ff_bytes()[:1].isalnum()

    def _may_end(self) -> bool:
        return any(map(self._allows, _ENDS[:3]))

    def _binds(self) -> bool:
        return bool(self._matcher.compute_ff_bytes()) or self._matcher.is_accepting()

    def _n_to_end(self) -> int:
        """Return about how much text is left of the value or the name: a large number if any."""
        if self._matcher.is_accepting():
            return 0
        if forced := self._matcher.compute_ff_bytes():
            return len(forced)
        ends: list[Step] = [*_VALUE_ENDS, *self._hints.control_tokens]
        return 1 if any(map(self._allows, ends)) else MAX_QUESTIONS

    def _after(self, step: Step, look: Callable[[], int]) -> int:
        tokens = self._tokens(step)
        self._n_left -= 2
        self._matcher.consume_tokens(tokens)
        found = look()
        self._matcher.rollback(len(tokens))
        return found

    def _allows(self, step: Step) -> bool:
        tokens = self._tokens(step)
        self._n_left -= 1
        return bool(tokens) and self._matcher.validate_tokens(tokens) == len(tokens)

    def _tokens(self, step: Step) -> list[int]:
        """Return one token per byte, or nothing if a byte has no token."""
        if isinstance(step, int):
            return [step]
        if len(step) == 1:
            return self._byte_tokens[step[0]] or []
        tokens = [self._byte_tokens[byte] for byte in step]
        return [token for each in tokens for token in each or ()] if None not in tokens else []


def _length(step: Step) -> int:
    return len(step) if isinstance(step, bytes) else 1


def _joined(steps: list[Step], as_tokens: Callable[[bytes], list[int]]) -> list[int]:
    """Return the steps as tokens. Text between control tokens is cut as a whole."""
    path: list[int] = []
    text = b""
    for step in steps:
        if isinstance(step, bytes):
            text += step
        else:
            path += [*as_tokens(text), step]
            text = b""
    return path + as_tokens(text)


def _hints(grammar: Grammar) -> _Hints:
    assert grammar.landing is not None
    closings = dict.fromkeys(json.loads(each) for each in _SUFFIX.findall(grammar.source))
    leads = dict.fromkeys(json.loads(each) for each in _LEAD.findall(grammar.source))
    tokens = dict.fromkeys(map(int, _CONTROL.findall(grammar.source)))
    distinct = dict.fromkeys(filter(None, grammar.landing.required_names))
    names = tuple(each.encode() for each in islice(distinct, MAX_HINTS))
    return _Hints(
        tuple(each.encode() for each in islice(closings, MAX_HINTS)),
        tuple(islice(tokens, MAX_HINTS)),
        tuple(each.encode() for each in islice(leads, MAX_HINTS)),
        names,
        tuple(sorted({name[:1] for name in names})),
    )
