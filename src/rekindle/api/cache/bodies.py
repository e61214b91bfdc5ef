"""Types of the cache endpoints and of `rekindle` in replies. OpenAPI is made from these."""

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from rekindle.api.body import WireModel
from rekindle.generation.request import Rank

MAX_PIN_SECONDS = 366 * 86_400  # picked

Tier = Literal["live", "memory", "disk", "shared", "upstream"]
Class = Literal["main", "background", "ephemeral"]
CLASSES: dict[Rank, Class] = {
    Rank.MAIN: "main",
    Rank.BACKGROUND: "background",
    Rank.EPHEMERAL: "ephemeral",
}


class Span(TypedDict):
    """Positions [start, stop) of the prompt."""

    source: Tier
    match: Literal["tokens", "remembered_turn"]
    start: int
    stop: int


class TierTokens(TypedDict):
    tier: Tier
    tokens: int


class DraftTokens(TypedDict):
    """Drafted tokens of a reply from one source."""

    source: Literal["grammar", "reply", "context", "store"]
    tokens: int
    accepted: int


class NeutralisedText(TypedDict):
    rule: str
    count: int


class OmittedMediaBody(TypedDict):
    """Media of the request that the model did not see."""

    kind: Literal["image", "audio", "video", "file"]
    text: str
    count: int


class StickyToolsBody(TypedDict):
    """Tools of the session that the prompt has, though the request does not, or not so."""

    change: Literal["dropped", "reordered"]
    tools: int
    saved_tokens: int


class MissBody(TypedDict):
    """Why the cache missed; see `MissReason`."""

    reason: str
    message: int | None
    part: str | None
    before: str
    expected: str
    got: str
    tokens_lost: int


_Classed = TypedDict("_Classed", {"class": Class})


class CacheStory(_Classed):
    cached: list[TierTokens]
    prefilled: int
    restored_ms: float
    remembered_turns: int
    dropped_messages: int
    spans: list[Span]
    session: str
    prefilled_twice: int
    drafts: NotRequired[list[DraftTokens]]  # absent: nothing was drafted
    reasoning_tokens: NotRequired[int]  # of the generated ones
    neutralised: NotRequired[list[NeutralisedText]]
    media_omitted: NotRequired[list[OmittedMediaBody]]
    sticky_tools: NotRequired[StickyToolsBody]
    miss: NotRequired[MissBody | None]  # only on request; null: nothing was missed


class CacheStories(CacheStory):
    """Cache reports of several replies. The first is also where a single report would be."""

    replies: list[CacheStory]


Rekindle = CacheStory | CacheStories


# The functional form, because `class` is a keyword.
StoredEntry = TypedDict(
    "StoredEntry",
    {
        "key": str,
        "name": str | None,
        "session": str,
        "class": Class,
        "tokens": int,
        "bytes": int,  # with everything before it
        "tiers": list[Tier],  # those that hold all of it
        "hits": int,
        "last_used": float,  # seconds since the epoch
        "pinned_until": float | None,
    },
)


class TierUsage(TypedDict):
    name: Tier
    entries: int
    bytes: int
    budget_bytes: int


class TierProps(TierUsage):
    trouble: str | None  # why nothing can be written to it at the moment
    directory: str | None  # path of the disk tier, or address of the shared store


class StoredList(TypedDict):
    object: Literal["list"]
    data: list[StoredEntry]
    usage: list[TierUsage]  # of all callers together


# Tokens without a fork: one branch of the tree of prefixes.
BranchEntry = TypedDict(
    "BranchEntry",
    {
        "key": str,  # of the prefix that ends with it
        "parent": int | None,  # index in the list of the branch before it
        "start": int,  # positions
        "stop": int,
        "bytes": int,
        "names": list[str],  # of prompts that end here
        "session": str,
        "class": Class,
        "tiers": list[Tier],  # those that hold all of it
        "hits": int,
        "last_used": float,  # seconds since the epoch
        "pinned_until": float | None,
    },
)


class Forest(TypedDict):
    object: Literal["list"]
    data: list[BranchEntry]  # parents first


class StoredText(TypedDict):
    object: Literal["cache.text"]
    key: str
    start: int  # position of the first token
    stop: int
    text: str


class PinRequest(WireModel):
    seconds: Annotated[float, Field(ge=0, le=MAX_PIN_SECONDS)]  # 0: unpin


class CachePinned(TypedDict):
    object: Literal["cache.pinned"]
    key: str
    seconds: float


class CacheDeleted(TypedDict):
    object: Literal["cache.deleted"]
    key: str | None  # null: a session, a namespace, or everything
    deleted: int  # in all places
    places: dict[str, int]  # where, and how much
    unreached: list[str]  # what could not be deleted, and why


class ExpectedTimes(TypedDict):
    """Times in milliseconds. Null: nothing was measured yet."""

    restore: float | None
    prefill: float | None
    total: float | None


class Lookup(TypedDict):
    object: Literal["cache.lookup"]
    prompt_tokens: int
    cached: list[TierTokens]
    prefilled: int
    expected_ms: ExpectedTimes
    miss: MissBody | None  # null: nothing would be missed


class SessionEntry(TypedDict):
    session: str
    last_used: float  # seconds since the epoch
    requests: int
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    prefilled_twice_tokens: int  # of these, computed earlier by this process


class SessionList(TypedDict):
    object: Literal["list"]
    data: list[SessionEntry]  # last used first
