"""Drafted tokens: guesses at the next tokens of a reply that the model checks in one step."""

from dataclasses import dataclass, field, fields
from enum import StrEnum


class DraftSource(StrEnum):
    """Where a draft comes from, most trusted first."""

    GRAMMAR = "grammar"  # the reply's grammar, where it leaves no choice
    REPLY = "reply"  # an earlier reply to the same prompt
    CONTEXT = "context"  # the prompt and the reply so far
    STORE = "store"  # stored prompts and replies of the namespace


@dataclass(frozen=True, slots=True)
class Drafted:
    """The draft of one step of one reply."""

    source: DraftSource
    n_tokens: int
    n_accepted: int  # leading tokens that the model sampled, too


@dataclass(slots=True)
class DraftCount:
    n_tokens: int = 0
    n_accepted: int = 0

    def __add__(self, other: "DraftCount") -> "DraftCount":
        return DraftCount(self.n_tokens + other.n_tokens, self.n_accepted + other.n_accepted)


@dataclass(slots=True, kw_only=True)
class DraftCounts:
    """Drafted tokens by source. Each source has a field of its name."""

    grammar: DraftCount = field(default_factory=DraftCount)
    reply: DraftCount = field(default_factory=DraftCount)
    context: DraftCount = field(default_factory=DraftCount)
    store: DraftCount = field(default_factory=DraftCount)

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        names = [each.name for each in fields(self)]
        return DraftCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def of(self, source: DraftSource) -> DraftCount:
        count: DraftCount = getattr(self, source.value)
        return count

    def note(self, drafted: Drafted) -> None:
        count = self.of(drafted.source)
        count.n_tokens += drafted.n_tokens
        count.n_accepted += drafted.n_accepted

    def by_source(self) -> dict[DraftSource, DraftCount]:
        """Return the sources that drafted anything."""
        return {source: self.of(source) for source in DraftSource if self.of(source).n_tokens}

    @property
    def n_tokens(self) -> int:
        return sum(self.of(source).n_tokens for source in DraftSource)

    @property
    def n_accepted(self) -> int:
        return sum(self.of(source).n_accepted for source in DraftSource)
