"""A model that says what a script tells it: real samplers and grammars, logits from the script.

Agents send no seeds, so the script sees the prompt, as text, and decides by that.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rekindle.config.engine import EngineSettings
from rekindle.errors import EngineError
from rekindle.generation.events import TokenSampled
from rekindle.generation.model_state import Payload
from rekindle.generation.request import Grammar, Sampling
from rekindle.llama.grammar.compiler import GrammarCompiler
from rekindle.llama.grammar.lazy import LazyGrammar
from rekindle.llama.grammar.matcher import Matcher
from rekindle.llama.sampling.dry import DrySamplers
from rekindle.llama.sampling.sampler import LlamaSampler
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from tests.support.fake_backend import FakeBackend, FakeSampler
from tests.support.tiny_vocabulary import TURN_END

SHORT_EVERY = 5  # tokens; picked
MAX_DEPARTURE = 2000  # bytes; the engine may end a call that is too long; picked


@dataclass(slots=True)
class Said:
    """One reply: what the script wants, and what the sampler made of it."""

    text: str
    fails_after: int | None = None  # bytes
    n_prompt: int = 0  # tokens
    tokens: list[int] = field(default_factory=list)  # sampled, without the end of the turn
    times: list[float] = field(default_factory=list)  # of these tokens
    n_bytes: int = 0  # of the text that are written
    departure: bytes = b""  # what was written instead, from the first other token
    is_whole: bool = False  # the text was written, and the turn ended after it

    def add(self, token: int, piece: bytes) -> None:
        self.tokens.append(token)
        self.times.append(time.monotonic())
        rest = self.text.encode()[self.n_bytes :]
        if self.departure or not rest.startswith(piece):
            self.departure += piece
        else:
            self.n_bytes += len(piece)


class ScriptSampler(FakeSampler):
    def __init__(self, sampler: LlamaSampler, said: Said) -> None:
        super().__init__()
        self.sampler = sampler
        self.said = said

    def close(self) -> None:
        super().close()
        self.sampler.close()


class ScriptedModel(FakeBackend):
    def __init__(
        self,
        vocabulary: Vocabulary,
        settings: EngineSettings,
        reply_to: Callable[[str], Said],
        *,
        token_seconds: float,
    ) -> None:
        super().__init__(n_slots=settings.parallel, n_cells=settings.ctx_size)
        self.eog_tokens = vocabulary.eog_tokens
        self._vocabulary = vocabulary
        self._reply_to = reply_to
        self._token_seconds = token_seconds
        self._grammars = GrammarCompiler(vocabulary)
        self._said: dict[tuple[int, ...], Said] = {}  # by prompt
        self._pieces = vocabulary.pieces(control_mark=b"\xff")
        self._by_bytes = {
            piece: token for token, piece in enumerate(self._pieces) if piece[:1] != b"\xff"
        }
        self._longest = max(map(len, self._by_bytes))
        [self._turn_end] = vocabulary.tokenize(TURN_END, parse_special=True)

    def new_sampler(
        self,
        sampling: Sampling,
        tokens: Sequence[int],
        n_reply: int,
        n_top_logprobs: int | None,
        *,
        n_left: int = 0,
        is_landing: bool = False,
        state: tuple[float, ...] = (),
    ) -> FakeSampler:
        prompt = tuple(tokens[: len(tokens) - n_reply])
        if not n_reply:
            text = self._vocabulary.detokenize(prompt, render_special=True)
            self._said[prompt] = self._reply_to(text.decode("utf-8", "replace"))
        said = self._said[prompt]
        said.n_prompt = len(prompt)
        grammar = sampling.grammar
        lands = grammar is not None and grammar.landing is not None
        sampler = LlamaSampler(
            replace(sampling, temperature=0.0, repeat_last_n=0),
            self._vocabulary,
            DrySamplers(self._vocabulary),
            grammar=self._grammar(grammar) if grammar else None,
            finder=self._grammars.end_finder(grammar) if grammar and lands else None,
            n_top_logprobs=n_top_logprobs,
            tokens=tokens,
            n_reply=n_reply,
            n_left=n_left,
            is_landing=is_landing,
            state=state,
        )
        return ScriptSampler(sampler, said)

    def _grammar(self, grammar: Grammar) -> Matcher | LazyGrammar:
        """As `LlamaBackend` does: without triggers and reasoning, the grammar begins at once."""
        matcher, start = self._grammars.matcher(grammar), grammar.start
        waits = bool(start.triggers) or start.begins_quiet
        return LazyGrammar(matcher, start, self._vocabulary) if waits else matcher

    def check_grammar(self, grammar: Grammar) -> None:
        self._grammars.check(grammar)

    def compiles_quickly(self, grammar: Grammar) -> bool:
        return self._grammars.is_quick(grammar)

    def sample(
        self, samplers: Sequence[FakeSampler], rows: Sequence[int]
    ) -> list[TokenSampled | Exception]:
        time.sleep(self._token_seconds)
        return [self._say(each) for each in _scripted(samplers)]

    def sample_stored(self, sampler: FakeSampler, logits: Payload) -> TokenSampled | Exception:
        [sampled] = self.sample([sampler], [0])
        return sampled

    def _say(self, sampler: ScriptSampler) -> TokenSampled | Exception:
        said = sampler.said
        rest = said.text.encode()[said.n_bytes :]
        if said.fails_after is not None and said.n_bytes >= said.fails_after:
            return EngineError("The script ends here.")
        if len(said.departure) > MAX_DEPARTURE:
            return EngineError(f"The script was left: {said.departure!r}")
        logits = np.zeros(self._vocabulary.n_vocab, dtype=np.float32)
        logits[self._turn_end] = 1.0
        # Not always the longest: a model's tokens are not those that a tokenizer makes.
        order = 1 if len(said.tokens) % SHORT_EVERY else -1
        for n_bytes in range(1, min(len(rest), self._longest) + 1):
            token = self._by_bytes.get(rest[:n_bytes])
            if token is not None:
                logits[token] = 100.0 + order * n_bytes
        token, logprobs = sampler.sampler.sample(logits)
        if token in self.eog_tokens:
            said.is_whole = not rest
        else:
            said.add(token, self._pieces[token])
        return TokenSampled(token, logprobs, sampler.sampler.is_landing)


def _scripted(samplers: Sequence[FakeSampler]) -> Iterator[ScriptSampler]:
    for sampler in samplers:
        assert isinstance(sampler, ScriptSampler)
        yield sampler
