"""What the campaign sent and found, line by line."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.campaigns.fuzz.watch import MIB, Memory, Probed

GROWTH_BYTES = 48 * MIB  # of one process, as `Memory.growth` compares; picked

MORE_FILES = 60  # connections and databases come and go; picked
# Problems that are equal in their first letters are of one sort.
NUMBERS = re.compile(r"\d+")
SORT_CHARS = 90
SHOWN = 3  # of one sort


@dataclass(slots=True)
class Report:
    seed: int
    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)  # the first few of each sort
    sorts: Counter[str] = field(default_factory=Counter)
    once: list[str] = field(default_factory=list)  # stalls that did not come again
    seconds: float = 0.0
    memory: Memory = field(default_factory=Memory)
    probed: Probed = field(default_factory=Probed)

    @property
    def n_cases(self) -> int:
        return sum(self.sent.values())

    def is_new(self, problem: str) -> bool:
        """Count the problem. Return False after the first few of its sort."""
        sort = NUMBERS.sub("", problem)[:SORT_CHARS]
        self.sorts[sort] += 1
        return self.sorts[sort] <= SHOWN

    def fail(self, problem: str, where: str = "") -> None:
        line = f"{where}{problem}"
        self.failures.append(line)
        tell(f"FOUND: {line}")

    def tell_once(self, stalls: str) -> None:
        self.once.append(stalls)
        tell(f"once, and not again: {stalls}")

    def finish(self) -> None:
        """Judge what was watched from the beginning to the end."""
        for stall in filter(self.is_new, self.probed.stalls):
            self.fail(stall)
        files = self.memory.files
        if files and files[-1] > files[0] + MORE_FILES:
            self.fail(f"{files[-1]} open files, {files[0]} at the first look")
        for name, n_bytes in self.memory.growth().items():
            if n_bytes > GROWTH_BYTES:
                problem = f"memory of the {name} grew by {n_bytes // MIB} MiB"
                if self.is_new(problem):
                    self.fail(problem)

    def lines(self) -> Iterator[str]:
        yield f"seed {self.seed}: {self.n_cases} cases in {self.seconds:.0f} s"
        yield "  cases: " + _counted(self.sent)
        yield "  answers: " + _counted(self.statuses)
        yield f"  {self.probed.line()}"
        yield f"  {self.memory.line()}"
        yield f"  stalls over 100 ms that did not come again: {len(self.once)}"
        yield f"  failures: {sum(self.sorts.values())}, of {len(self.sorts)} sorts"
        yield from (f"    {problem}" for problem in self.failures)


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counter.items()))


def tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
