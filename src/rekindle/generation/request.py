"""Requests to an engine: a prompt, how to sample, how long to keep its rows."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from hashlib import blake2b

from rekindle.generation.events import Spans
from rekindle.generation.forgetting import Owner


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    LARK = "lark"
    REGEX = "regex"
    GBNF = "gbnf"  # llama.cpp's form


MAX_GRAMMAR_BYTES = 2**20  # of a source: 700 tools of 1.5 kB


@dataclass(frozen=True, slots=True)
class Trigger:
    """Text that starts a grammar, at the text's first character."""

    text: str
    at_start: bool = False  # only at the start of the reply, after white space and quiet spans


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarStart:
    """The point from which a grammar applies. Control tokens count as their text."""

    triggers: tuple[Trigger, ...] = ()  # none: at once, or right after the first quiet span
    quiet: tuple[str, str] | None = None  # opening and closing text of spans without triggers
    quiet_anywhere: bool = True  # False: quiet spans open only at the start of the reply
    begins_quiet: bool = False  # the prompt has opened a quiet span


# Reserve for the end of a call. A call that begins with this many tokens left is always finished,
# unless its shortest form is longer. Picked: 20 required strings with short names.
LANDING_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Landing:
    """A grammar with it is led to a short end in time, before the reply is cut off."""

    required_names: tuple[str, ...] = ()  # of members: the search for an end tries them first


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the reply, in the source form that the grammar engine compiles."""

    kind: GrammarKind
    source: str
    start: GrammarStart = GrammarStart()
    landing: Landing | None = None  # None: the reply may be cut off anywhere
    samples: tuple[tuple[int, ...], ...] = ()  # tokens of whole replies: a check tries each
    field: str = "response_format"  # of the request, for its errors


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningLimit:
    """The most tokens of reasoning. At the limit its closing mark is forced."""

    max_tokens: int  # in all spans of the reply together; 0: a span is closed where it opens
    opening: str
    closing: str
    anywhere: bool = False  # also after text; otherwise only where the reply begins
    begins_inside: bool = False  # the prompt has opened the reasoning


class SamplerName(StrEnum):
    """A step of the sampling, by llama-server's name."""

    PENALTIES = "penalties"
    DRY = "dry"
    TOP_N_SIGMA = "top_n_sigma"
    TOP_K = "top_k"
    TYPICAL_P = "typ_p"
    TOP_P = "top_p"
    MIN_P = "min_p"
    XTC = "xtc"
    TEMPERATURE = "temperature"
    INFILL = "infill"
    ADAPTIVE_P = "adaptive_p"


DEFAULT_SAMPLERS = (
    SamplerName.PENALTIES,
    SamplerName.DRY,
    SamplerName.TOP_N_SIGMA,
    SamplerName.TOP_K,
    SamplerName.TYPICAL_P,
    SamplerName.TOP_P,
    SamplerName.MIN_P,
    SamplerName.XTC,
    SamplerName.TEMPERATURE,
)
KEEP_BEST = {
    SamplerName.PENALTIES,  # come before all others
    SamplerName.TOP_N_SIGMA,
    SamplerName.TOP_K,
    SamplerName.TOP_P,
    SamplerName.MIN_P,
    SamplerName.TEMPERATURE,
}
USUAL_SAMPLERS = KEEP_BEST - {SamplerName.TOP_N_SIGMA} | {SamplerName.TYPICAL_P}
DRY_BREAKERS = ("\n", ":", '"', "*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings. The defaults are llama.cpp's, as its users expect."""

    temperature: float = 0.8  # 0: greedy
    dynatemp_range: float = 0.0  # 0: off
    dynatemp_exponent: float = 1.0
    top_k: int = 40  # 0: off
    top_p: float = 0.95
    min_p: float = 0.05
    top_n_sigma: float = -1.0  # 0 or less: off
    typical_p: float = 1.0
    xtc_probability: float = 0.0  # 0: off
    xtc_threshold: float = 0.1  # more than 0.5: off
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # -1: the whole context
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64  # -1: the whole context
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS
    mirostat: int = 0  # 1 or 2: that version of it; 0: off
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0  # negative: off
    adaptive_decay: float = 0.9
    samplers: tuple[SamplerName, ...] = DEFAULT_SAMPLERS
    min_keep: int = 0  # the fewest candidates that a sampler leaves
    post_sampling_probs: bool = False  # reported probabilities are those after the samplers
    seed: int | None = None  # None: a fresh one per request
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    reasoning_limit: ReasoningLimit | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether tokens of the prompt or the reply change the logits, before other samplers."""
        return (
            self._has_effect(SamplerName.PENALTIES)
            and self.samplers[:1] == (SamplerName.PENALTIES,)
            and not self.mirostat
        )

    @property
    def has_own_breakers(self) -> bool:
        """Whether DRY has to look for sequence breakers that it may not know."""
        return self.dry_multiplier != 0.0 and self.dry_sequence_breakers != DRY_BREAKERS

    @property
    def has_xtc(self) -> bool:
        return self.xtc_probability > 0 and self.xtc_threshold <= 0.5

    @property
    def is_usual(self) -> bool:
        """Whether penalties, top k, typical p, top p, min p and temperature choose, in this order.

        Without randomness, samplers that keep the likeliest token may stand in any order.
        """
        if self.mirostat or self.dynatemp_range > 0.0 or self.min_keep > 1:
            return False
        effective = [name for name in self.samplers if self._has_effect(name)]
        if self.post_sampling_probs or (
            SamplerName.PENALTIES in effective and not self.has_penalties
        ):
            return False
        if self.temperature == 0.0:
            return SamplerName.TEMPERATURE in effective and KEEP_BEST.issuperset(effective)
        usual = [name for name in DEFAULT_SAMPLERS if self._has_effect(name)]
        return effective == usual and USUAL_SAMPLERS.issuperset(usual)

    def _has_effect(self, name: SamplerName) -> bool:
        """Return whether this sampler changes anything with these settings."""
        match name:
            case SamplerName.PENALTIES:
                values = self.repeat_penalty, self.frequency_penalty, self.presence_penalty
                return self.repeat_last_n != 0 and values != (1.0, 0.0, 0.0)
            case SamplerName.DRY:
                return self.dry_multiplier != 0.0
            case SamplerName.TOP_N_SIGMA:
                return self.top_n_sigma > 0.0
            case SamplerName.TOP_K:
                return self.top_k > 0
            case SamplerName.TYPICAL_P:
                return self.typical_p < 1.0
            case SamplerName.TOP_P:
                return self.top_p < 1.0
            case SamplerName.MIN_P:
                return self.min_p > 0.0
            case SamplerName.XTC:
                return self.has_xtc
            case SamplerName.ADAPTIVE_P:
                return self.adaptive_target >= 0.0
            case SamplerName.TEMPERATURE | SamplerName.INFILL:
                return True


class Rank(IntEnum):
    """The value of a request's rows: the highest number is evicted first."""

    MAIN = 0  # a conversation that will continue
    BACKGROUND = 1  # a title, a summary
    EPHEMERAL = 2  # a sub-agent


@dataclass(frozen=True, slots=True)
class Pin:
    """Protects the first `n_tokens` of a prompt from eviction for a while."""

    n_tokens: int
    seconds: float


DEFAULT_SESSION = "default"
MAX_SESSION_CHARS = 128


def session_name(id: str) -> str:
    """Return the name under which a client's session is stored: printable and bounded."""
    name = "".join(filter(str.isprintable, id)).strip()
    return name if len(name) <= MAX_SESSION_CHARS else digest(name)


def digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTerms:
    """Terms for keeping and sharing a request's rows."""

    namespace: str = ""  # rows and turns are shared within a namespace only
    session: str = DEFAULT_SESSION
    rank: Rank = Rank.MAIN
    pins: tuple[Pin, ...] = ()
    name: str | None = None  # for the list of stored prompts
    persist: bool = False  # the request ends once its prompt is on disk, or fails
    # When the request arrived, in seconds since the epoch. 0: unknown, so any deletion covers it.
    asked_at: float = 0.0

    @property
    def owner(self) -> Owner:
        return Owner(namespace=self.namespace, session=self.session, asked_at=self.asked_at)


USUAL_TERMS = CacheTerms()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The part of a reply from before a restart of the engine."""

    reply: tuple[int, ...]  # tokens that were sampled
    spans: Spans | None  # cached parts of the prompt; None: not reported yet
    seconds: float  # since the request arrived
    is_landing: bool = False  # the last token was forced, to end a call in time
    sampler_state: tuple[float, ...] = ()  # after the last token, as its event reported it


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    id: str
    prompt: tuple[int, ...]
    boundaries: tuple[int, ...]  # positions worth a checkpoint, ascending
    sampling: Sampling
    max_tokens: int | None  # None: until the context ends; 0: evaluate the prompt, sample nothing
    n_top_logprobs: int | None = None  # None: no log probabilities at all
    cache_prompt: bool = True  # False: the cache is neither read nor written
    speculate: bool = True  # False: nothing is drafted
    background: bool = False  # runs while the engine is idle, and yields to any other request
    terms: CacheTerms = USUAL_TERMS
    number: int = 0  # names the request between processes; 0: none
    resumed: Resumed | None = None  # None: the request is new


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    id: str
    inputs: tuple[tuple[int, ...], ...]  # none is empty, or longer than EmbedderStatus.n_ctx
    number: int = 0
