"""Derives a dialect from a chat template, and proves it.

No template and no mark is recognised by its name. Everything follows from how renderings of
probe conversations differ. What cannot be derived says so in one line.
"""

from dataclasses import dataclass, replace
from threading import Lock

from rekindle.bounded_cache import BoundedCache
from rekindle.chat.dialects.base import Dialect, ReasoningMarks
from rekindle.chat.dialects.call_format import CallFormat
from rekindle.chat.dialects.derive.arguments import CannotDerive
from rekindle.chat.dialects.derive.calls import Calls, derive_calls
from rekindle.chat.dialects.derive.describe import describe
from rekindle.chat.dialects.derive.probes import Probes
from rekindle.chat.dialects.derive.reasoning import NO_MARKS, Surroundings, derive_surroundings
from rekindle.chat.dialects.derive.verify import Verifier, WrittenCalls
from rekindle.chat.dialects.formatted import formatted
from rekindle.chat.template.template import ChatTemplate

NAME = "derived"
CANNOT = "cannot be derived"

_MAX_KEPT = 32  # derivations; picked


@dataclass(frozen=True, slots=True)
class Derivation:
    """What is known about a template's calls and reasoning."""

    dialect: Dialect | None  # None: its calls cannot be derived
    losses: tuple[str, ...] = ()  # what the template cannot write so that it reads back
    reason: str = ""  # one line for the operator
    format: CallFormat | None = None  # also if it could not be proven
    surroundings: Surroundings = NO_MARKS  # also without calls
    is_parallel: bool = True  # the template writes several calls in one turn
    written: tuple[WrittenCalls, ...] = ()  # which the grammar must accept


class Derivations:
    """Derives each template once. Thread-safe."""

    def __init__(self) -> None:
        self._known: BoundedCache[str, Derivation] = BoundedCache(max_items=_MAX_KEPT)
        self._lock = Lock()

    def of(self, template: ChatTemplate) -> Derivation:
        with self._lock:
            known = self._known.get(template.digest)
            if known is None:
                known = derive(template)
                self._known.put(template.digest, known)
        return known


def derive(template: ChatTemplate) -> Derivation:
    """Derive the template's dialect. Never raises: what cannot be derived has a reason."""
    with template.bounded():
        try:
            return _derive(template)
        except Exception as error:  # templates write anything; none may keep a model from loading
            return _failed(f"its text has an unexpected shape ({type(error).__name__}: {error})")


def prove(template: ChatTemplate, dialect: Dialect) -> Derivation:
    """Hold a dialect that was written by hand to the same round trip as a derived one."""
    with template.bounded():
        try:
            probes = Probes(template)
            calls = derive_calls(probes)
            return _proven(Verifier(probes, calls, dialect), calls)
        except Exception as error:  # as above
            return _failed(str(error))


def _derive(template: ChatTemplate) -> Derivation:
    probes = Probes(template)
    if not template.traits.calls or not template.traits.tools:
        missing = "writes no calls" if not template.traits.calls else "describes no tools"
        return _failed(f"the template {missing}", surroundings=_surroundings(template, probes))
    try:
        calls = derive_calls(probes)
    except CannotDerive as error:
        return _failed(str(error), surroundings=_surroundings(template, probes))
    surroundings = derive_surroundings(probes, calls)
    if surroundings.reasoning is None:
        surroundings = replace(surroundings, reasoning=_switched(template))
    dialect = _with_surroundings(formatted(NAME, calls.format), surroundings)
    verifier = Verifier(probes, calls, dialect)
    if not verifier.reads_reasoning():
        surroundings = replace(surroundings, reasoning=None)
        verifier = Verifier(probes, calls, replace(dialect, reasoning=None))
    try:
        proven = _proven(verifier, calls)
    except CannotDerive as error:
        return _failed(str(error), format=calls.format, surroundings=surroundings)
    return replace(proven, surroundings=surroundings)


def _proven(verifier: Verifier, calls: Calls) -> Derivation:
    """Raises CannotDerive."""
    losses = verifier.losses()
    return Derivation(
        verifier.dialect,
        losses,
        f"derived: {describe(calls.format)}",
        calls.format,
        is_parallel=calls.is_parallel,
        written=tuple(verifier.written),
    )


def _surroundings(template: ChatTemplate, probes: Probes) -> Surroundings:
    """Return the marks of a template whose calls are unknown."""
    found = derive_surroundings(probes)
    if found.reasoning is None:
        found = replace(found, reasoning=_switched(template))
    return found


def _switched(template: ChatTemplate) -> ReasoningMarks | None:
    """Return the marks that the template writes only if the client switches reasoning."""
    for is_on in (True, False):
        probes = Probes(template, enable_thinking=is_on, thinking=is_on)
        if marks := derive_surroundings(probes).reasoning:
            return marks
    return None


def _with_surroundings(dialect: Dialect, found: Surroundings) -> Dialect:
    return replace(
        dialect,
        reasoning=found.reasoning,
        hidden=dialect.hidden + found.hidden,
        hidden_at_edges=dialect.hidden_at_edges + found.hidden_at_edges,
    )


def _failed(
    why: str,
    *,
    format: CallFormat | None = None,
    surroundings: Surroundings = NO_MARKS,
) -> Derivation:
    return Derivation(None, (), f"{CANNOT}: {why}", format, surroundings)
