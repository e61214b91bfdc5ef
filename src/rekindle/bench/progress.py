"""Progress of a run: callbacks for the terminal, and the rows so far."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rekindle.bench.report.results import BurstRow, RequestRow, WorkloadRow


@dataclass(slots=True)
class Progress:
    """Callbacks for the terminal, and all rows so far: an interrupted run keeps them."""

    on_step: Callable[[str], None]  # what runs now
    on_done: Callable[[], None]
    on_trouble: Callable[[str], None]  # a burst failed; workloads have notes instead
    requests: list[RequestRow] = field(default_factory=list)
    workloads: list[WorkloadRow] = field(default_factory=list)
    bursts: list[BurstRow] = field(default_factory=list)

    def add(self, workload: WorkloadRow, requests: Sequence[RequestRow]) -> None:
        self.workloads.append(workload)
        self.requests += requests
        self.on_done()
