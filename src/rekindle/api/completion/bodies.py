"""Reply types of llama-server's own completion endpoints. OpenAPI is made from these."""

from typing import Literal, NotRequired

from pydantic import RootModel
from typing_extensions import TypedDict

from rekindle.api.cache.bodies import Rekindle
from rekindle.api.native.schema import SamplingProps
from rekindle.api.openai.bodies import PromptProgress, Timings

StopType = Literal["none", "eos", "limit", "word"]


class TokenBias(TypedDict):
    token: int
    bias: float | None  # null: the token is banned


class GenerationSettings(SamplingProps):
    """The settings of a reply, as they were applied."""

    stop: list[str]
    n_keep: int
    n_discard: int
    stream: bool
    logit_bias: list[TokenBias]
    grammar: str
    grammar_lazy: bool
    chat_format: str
    timings_per_token: bool
    lora: list[int]


class CandidateToken(TypedDict):
    id: int
    token: str
    bytes: list[int]
    logprob: NotRequired[float]
    prob: NotRequired[float]  # instead of it, with `post_sampling_probs`


class TokenChances(CandidateToken):
    top_logprobs: NotRequired[list[CandidateToken]]
    top_probs: NotRequired[list[CandidateToken]]


class NativeEvent(TypedDict):
    """A part of a streamed reply. The last one is a `NativeCompletion`."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int  # as the client sent it; -1: none
    tokens_predicted: int
    tokens_evaluated: int
    timings: NotRequired[Timings]
    prompt_progress: NotRequired[PromptProgress]
    completion_probabilities: NotRequired[list[TokenChances]]


class NativeCompletion(TypedDict, total=False):
    """A whole reply. With `response_fields`, it has only these, some with slashes in their name."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: GenerationSettings
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: StopType
    stopping_word: str
    tokens_cached: int
    timings: Timings
    completion_probabilities: list[TokenChances]
    rekindle: Rekindle


class NativeReply(RootModel[NativeCompletion | list[NativeCompletion]]):
    """One reply, or a list of several."""


class NativeStream(RootModel[NativeEvent | NativeCompletion]):
    """Events of a stream."""
