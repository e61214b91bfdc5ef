"""Audit one trace: what its prompts make a server prefill, and the faults that cost tokens."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.chat.prompt.prompt import Prompt, PromptBuilder
from rekindle.errors import InvalidRequest
from rekindle.lint.faults import Change, change_between
from rekindle.lint.predecessors import SentPrompts
from rekindle.replay.as_chat import conversation_in
from rekindle.replay.traffic import ReplayRequest

MIN_LOST_TOKENS = 64  # of a request: fewer are not worth a change of the client; picked


@dataclass(frozen=True, slots=True)
class Loss:
    """A request that sends tokens again behind a change."""

    request: ReplayRequest
    change: Change
    n_lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The losses of one kind at one place."""

    losses: tuple[Loss, ...]
    n_lost: int
    seconds: float | None  # None: the prefill speed is unknown

    @property
    def change(self) -> Change:
        return self.losses[-1].change

    @property
    def key(self) -> str:
        """Identifies the fault in a baseline."""
        return f"{self.change.kind} {self.change.where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceAudit:
    name: str
    n_requests: int
    n_unread: int  # requests whose prompt cannot be rendered
    n_skipped: int  # lines of the trace whose request cannot be read
    n_prompt: int  # tokens of all prompts
    n_prefilled: int  # the least that a server must compute: the floor
    n_lost: int  # prefilled tokens that the client had sent before
    speed: float | None  # prefilled tokens per second
    faults: tuple[Fault, ...]  # most expensive first

    @property
    def n_left_out(self) -> int:
        return self.n_unread + self.n_skipped

    @property
    def n_new(self) -> int:
        return self.n_prefilled - self.n_lost

    @property
    def amplification(self) -> float:
        """Tokens to prefill for each token that is new. 1: the client loses nothing."""
        return self.n_prefilled / self.n_new if self.n_new else 1.0

    @property
    def seconds_lost(self) -> float | None:
        return self.n_lost / self.speed if self.speed else None


def audit(
    name: str,
    requests: Sequence[ReplayRequest],
    builder: PromptBuilder,
    *,
    speed: float | None = None,
    n_skipped: int = 0,
) -> TraceAudit:
    """Audit the requests, which are in the order they were sent.

    `speed`: prefilled tokens per second; None: from the times in the trace, where it has them.
    """
    sent = SentPrompts()
    losses: list[Loss] = []
    n_read = n_prompt = n_prefilled = 0
    timed: list[tuple[int, float]] = []
    for request in requests:
        prompt = _prompt_of(request, builder)
        if prompt is None:
            continue
        continued = sent.add(request, prompt)
        n_read += 1
        n_prompt += len(prompt.tokens)
        n_prefilled += continued.n_prefilled
        if request.started is not None and request.first_byte is not None:
            timed.append((continued.n_prefilled, request.first_byte - request.started))
        if continued.earlier is not None and continued.n_resent >= MIN_LOST_TOKENS:
            change = change_between(continued.earlier, sent.last, continued.n_shared)
            losses.append(Loss(request, change, continued.n_resent))
    speed = speed or _speed_of(timed)
    return TraceAudit(
        name=name,
        n_requests=len(requests),
        n_unread=len(requests) - n_read,
        n_skipped=n_skipped,
        n_prompt=n_prompt,
        n_prefilled=n_prefilled,
        n_lost=sum(loss.n_lost for loss in losses),
        speed=speed,
        faults=_faults(losses, speed),
    )


def _prompt_of(request: ReplayRequest, builder: PromptBuilder) -> Prompt | None:
    """Return the prompt. None: invalid, refused by the template, or it needs a stored response."""
    raw = request.body.get("prompt")
    is_raw = request.path == "/v1/completions" or request.body.get("raw") is True
    try:
        if is_raw and isinstance(raw, str):
            return builder.from_text(raw, recalls=False)
        if is_raw and isinstance(raw, list):
            return builder.from_tokens(raw)
        conversation = None if is_raw else conversation_in(request)
        if conversation is None:
            return None
        return builder.from_conversation(conversation, recalls=False)
    except InvalidRequest:
        return None


def _speed_of(timed: Sequence[tuple[int, float]]) -> float | None:
    """Return tokens per second up to the first byte of the replies. None: no times are known."""
    seconds = sum(waited for _, waited in timed)
    n_tokens = sum(n for n, _ in timed)
    return n_tokens / seconds if seconds > 0 and n_tokens else None


def _faults(losses: Sequence[Loss], speed: float | None) -> tuple[Fault, ...]:
    groups: dict[object, list[Loss]] = defaultdict(list)
    for loss in losses:
        groups[loss.change.kind, loss.change.where].append(loss)
    faults = []
    for group in groups.values():
        n_lost = sum(loss.n_lost for loss in group)
        seconds = n_lost / speed if speed else None
        faults.append(Fault(losses=tuple(group), n_lost=n_lost, seconds=seconds))
    return tuple(sorted(faults, key=lambda fault: -fault.n_lost))
