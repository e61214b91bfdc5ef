"""Operations on a World, drawn by hypothesis: trees of conversations, failures, restarts."""

import shutil
import tempfile
from collections import Counter
from enum import Enum, auto
from pathlib import Path
from typing import ClassVar, NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from rekindle.config.choices import WritePolicy
from tests.support.fidelity import Damage, Ending, Failure, World
from tests.support.fidelity_setup import ROOMY_ENTRIES, Setup, Subject
from tests.support.stepped_transfers import AT_ONCE, Pace

MAX_ALIVE = 6
N_SEEDS = 6  # of texts: two requests often begin alike


class Kind(Enum):
    NEW = auto()
    EXTEND = auto()  # an earlier prompt, its reply, and more
    FORK = auto()  # the beginning of one, and something else
    REPEAT = auto()
    TRIM = auto()  # the beginning of one


class Wish(NamedTuple):
    """A prompt, derived from earlier texts, and the options of its request."""

    kind: Kind
    which: int
    position: int
    seed: int
    n_new: int
    n_reply: int
    cache_prompt: bool
    boundaries: tuple[int, ...]


class Ask(NamedTuple):
    """Run a request to its end, beside all others that still run."""

    wish: Wish
    pace: Pace


class AskTogether(NamedTuple):
    wishes: list[Wish]
    n_steps_between: int
    pace: Pace


class Submit(NamedTuple):
    """Submit a request that runs during later operations."""

    wish: Wish


class Steps(NamedTuple):
    n_steps: int
    pace: Pace


class AskAndCancel(NamedTuple):
    wish: Wish
    n_steps: int
    pace: Pace
    which: int  # of all that run


class Upkeep(Enum):
    SETTLE = auto()
    DROP_MEMORY = auto()
    DEMOTE = auto()


class Wait(NamedTuple):
    seconds: float


class Restart(NamedTuple):
    ending: Ending
    is_backend_fresh: bool


class DamageFiles(NamedTuple):
    first: int
    stride: int
    how: Damage
    offset: int


class FailDisk(NamedTuple):
    n_calls: int


Operation = (
    Ask
    | AskTogether
    | Submit
    | Steps
    | AskAndCancel
    | Upkeep
    | Wait
    | Restart
    | DamageFiles
    | Failure
    | FailDisk
)

lengths = st.one_of(
    st.integers(1, 12),
    st.sampled_from([63, 64, 65, 255, 256, 257, 513]),
    st.integers(13, 300),
    st.integers(200, 700),
)
positions = st.one_of(st.integers(1, 2000), st.sampled_from([1, 255, 256, 257, 511, 512, 513]))
paces = st.sampled_from([AT_ONCE, Pace(1, 1), Pace(0, 0), Pace(1, 0), Pace(0, 1), Pace(4, 2)])
places = st.one_of(st.just(0), st.integers(0, 15))


def wishes(*kinds: Kind) -> st.SearchStrategy[Wish]:
    return st.builds(
        Wish,
        kind=st.sampled_from(kinds),
        which=places,
        position=positions,
        seed=st.integers(0, N_SEEDS),
        n_new=lengths,
        n_reply=st.integers(1, 10),
        cache_prompt=st.sampled_from([True] * 9 + [False]),
        boundaries=st.lists(st.integers(1, 900), max_size=3, unique=True).map(sorted).map(tuple),
    )


any_wishes = wishes(*Kind)
operations: st.SearchStrategy[Operation] = st.one_of(
    *(st.builds(Ask, wishes(kind), paces) for kind in Kind),
    st.builds(Submit, any_wishes),
    st.builds(
        AskTogether,
        st.lists(any_wishes, min_size=2, max_size=4),
        st.integers(0, 3),
        paces,
    ),
    st.builds(Steps, st.integers(1, 8), paces),
    st.builds(AskAndCancel, any_wishes, st.integers(0, 6), paces, places),
    st.sampled_from(Upkeep),
    st.just(Upkeep.DEMOTE),
    st.builds(Restart, st.sampled_from(Ending), st.booleans()),
    st.one_of(
        st.builds(Wait, st.sampled_from([1.0, 10.0, 3600.0])),
        st.builds(
            DamageFiles,
            places,
            st.sampled_from([1000, 3, 1]),
            st.sampled_from(Damage),
            st.integers(0, 2**20),
        ),
    ),
    st.sampled_from([*Failure, FailDisk(1), FailDisk(3)]),
)
setups = st.builds(
    Setup,
    n_slots=st.sampled_from([2, 1, 3, 4]),
    n_cells=st.sampled_from([2048, 512, 1024, 4096]),
    n_ubatch=st.sampled_from([256, 64, 512]),
    memory_entries=st.sampled_from([ROOMY_ENTRIES, ROOMY_ENTRIES, 0, 3, 8, 30]),
    disk_entries=st.sampled_from([ROOMY_ENTRIES, ROOMY_ENTRIES, ROOMY_ENTRIES, 4, 15, None]),
    write_policy=st.sampled_from([WritePolicy.ALL, WritePolicy.ALL, WritePolicy.REUSED]),
    min_tokens=st.sampled_from([0, 0, 300]),
    written_per_hour=st.sampled_from([0, 0, 0, 20]),
    min_path_checkpoints=st.sampled_from([16, 4]),
    may_recompute=st.sampled_from([False, False, True]),
    is_calm=st.booleans(),
)


class FidelityMachine(RuleBasedStateMachine):
    """Subclasses name the subject, and count what was done to it."""

    subject: ClassVar[Subject]
    has_threads: ClassVar[bool]
    counts: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="fidelity-"))
        self.is_sound = True  # no operation has failed

    @initialize(setup=setups)
    def open(self, setup: Setup) -> None:
        self.world = World(self.subject, setup, self.directory, has_threads=self.has_threads)

    # One rule for all: of several, hypothesis leaves some out of each world.
    @rule(operation=operations)
    def do(self, operation: Operation) -> None:
        self.is_sound = False
        carry_out(operation, self.world, self.subject)
        self.is_sound = True
        self.counts[_name(operation)] += 1

    def teardown(self) -> None:
        try:
            if self.is_sound:
                self.world.settle()
                self.world.close()
                self.counts.update(self.world.counts)
            else:
                self.world.abandon()
        finally:
            shutil.rmtree(self.directory)


def carry_out(operation: Operation, world: World, subject: Subject) -> None:
    match operation:
        case Ask(wish, pace):
            _submit(wish, world, subject)
            world.finish(pace)
        case AskTogether(several, n_steps, pace):
            for wish in several:
                _submit(wish, world, subject)
                world.take_steps(n_steps, pace)
            world.finish(pace)
        case Submit(wish):
            _submit(wish, world, subject)
        case Steps(n_steps, pace):
            world.take_steps(n_steps, pace)
        case AskAndCancel(wish, n_steps, pace, which):
            _submit(wish, world, subject)
            world.take_steps(n_steps, pace)
            world.cancel(which)
        case Upkeep.SETTLE:
            world.settle()
        case Upkeep.DROP_MEMORY:
            world.drop_memory()
        case Upkeep.DEMOTE:
            world.demote()
        case Wait(seconds):
            world.wait(seconds)
        case Restart(ending, is_backend_fresh):
            world.restart(ending, fresh_backend=is_backend_fresh)
        case DamageFiles(first, stride, how, offset):
            world.damage(first, stride, how, offset)
        case FailDisk(n_calls):
            world.fail_disk(n_calls)
        case Failure():
            world.fail_next(operation)


def _submit(wish: Wish, world: World, subject: Subject) -> None:
    if world.n_alive < MAX_ALIVE:
        world.submit(
            _prompt(wish, world, subject),
            wish.n_reply,
            cache_prompt=wish.cache_prompt,
            boundaries=wish.boundaries,
        )


def _prompt(wish: Wish, world: World, subject: Subject) -> list[int]:
    new = subject.text(wish.seed, wish.n_new)
    if wish.kind is Kind.NEW or not world.prompts:
        return new
    # The latest first: hypothesis tries small numbers when it shrinks.
    text = world.texts[-1 - wish.which % len(world.texts)]
    position = wish.position if wish.position <= len(text) else wish.position % len(text) + 1
    match wish.kind:
        case Kind.EXTEND:
            return text + new
        case Kind.FORK:
            return text[:position] + new
        case Kind.TRIM:
            return text[:position]
        case _:
            return world.prompts[-1 - wish.which % len(world.prompts)]


def _name(operation: Operation) -> str:
    match operation:
        case Ask(wish):
            return wish.kind.name.lower()
        case Enum():
            return operation.name.lower()
        case _:
            return type(operation).__name__


def machine_for(subject: Subject, *, has_threads: bool = False) -> type[FidelityMachine]:
    members = {"subject": subject, "has_threads": has_threads, "counts": Counter[str]()}
    return type("Machine", (FidelityMachine,), members)


def count_checked_operations(subject: Subject, *, n_worlds: int, n_operations: int) -> Counter[str]:
    """Run operations on new worlds and return how often each kind ran.

    Raise an AssertionError with the shortest failing steps where a reply, an account or a
    restored piece differs from what it should be.
    """
    machine = machine_for(subject)
    run_state_machine_as_test(
        machine, settings=budget(n_worlds=n_worlds, n_operations=n_operations)
    )
    return machine.counts


def budget(*, n_worlds: int, n_operations: int) -> settings:
    """No database: a run depends on nothing but its seed."""
    return settings(
        max_examples=n_worlds,
        stateful_step_count=n_operations,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
