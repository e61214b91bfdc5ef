"""One workload on one server: a new process in an empty folder, the traffic, the counts.

A server that cannot do something gets a note, and the run continues.
"""

import textwrap
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rekindle.bench.peers.contenders import Contender, Flags, RemoteServer, timeline_folder
from rekindle.bench.peers.processes import DidNotStart, started
from rekindle.bench.report.results import Progress
from rekindle.bench.report.rows import Played, nothing_row, request_rows, workload_row
from rekindle.bench.stage import Stage
from rekindle.bench.timeline.report import write_timeline
from rekindle.bench.workloads.texts import Texts
from rekindle.bench.workloads.workloads import Workload
from rekindle.errors import StartupError
from rekindle.replay.client import Outcome
from rekindle.replay.prompts import Counted, FloorCounter

MAX_ERROR_CHARS = 160  # of a note; picked
BELOW_FLOOR = 0.99  # picked: the floor misses a few tokens of replies


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The same for every server and workload."""

    model: Path
    shows_tools: bool  # the model's own template shows tools; else ours replaces it
    threads: int
    texts: Texts
    is_quick: bool
    scratch: Path  # on a disk, for the folders of servers
    draws_timelines: bool = False
    ubatch_size: int | None = None  # None: each server's default


class Play:
    """One workload on one server, in one round."""

    def __init__(
        self,
        contender: Contender,
        workload: Workload,
        round_number: int,
        conditions: Conditions,
        progress: Progress,
    ) -> None:
        self._contender = contender
        self._workload = workload
        self._conditions = conditions
        self._progress = progress
        self._played = Played(workload.name, contender.name, round_number)
        self._template = workload.template_for(shows_tools=conditions.shows_tools)

    async def run(self) -> None:
        """Play the workload and add its rows to the progress, also after Ctrl-C."""
        async with AsyncExitStack() as stack:
            try:
                self._show("starting")
                stage = await self._stage(stack)
                stack.push_async_callback(stage.close)
                await stage.open()
            except (DidNotStart, StartupError) as error:
                self._progress.add(nothing_row(self._played, error.message), ())
                return
            try:
                await self._workload.play(stage)
            except (DidNotStart, StartupError) as error:  # after the kill in the middle
                stage.notes.append(error.message)
            finally:
                self._show("counting the floor")
                await self._conclude(stage)

    def _show(self, what: str) -> None:
        self._progress.on_step(f"{self._workload.name}  {self._contender.name}  {what}")

    async def _stage(self, stack: AsyncExitStack) -> Stage:
        """Return the stage of the server, which is started unless it is a remote one."""
        contender, workload = self._contender, self._workload
        process = None
        if isinstance(contender, RemoteServer):
            url = contender.url
        else:
            flags = Flags(
                model=self._conditions.model,
                ctx_size=workload.ctx_size,
                parallel=workload.parallel,
                threads=self._conditions.threads,
                ubatch_size=self._conditions.ubatch_size,
                cache_ram_mib=workload.cache_ram_mib,
                chat_template=self._template,
            )
            process = await started(contender, flags, self._conditions.scratch, stack)
            url = process.url
        return Stage(
            url=url,
            process=process,
            texts=self._conditions.texts,
            n_slots=workload.parallel,
            is_quick=self._conditions.is_quick,
            calls_tools=contender.calls_tools,
            on_request=self._show,
        )

    async def _conclude(self, stage: Stage) -> None:
        # Read the counters now: the server may already prefill a turn that never comes.
        n_prefilled = await stage.n_prefilled()
        stage.read_log()
        if n_prefilled is None:
            n_prefilled = stage.n_prefilled_by_replies()
        counter = FloorCounter(stage.server)
        traffic = stage.traffic
        counted = {
            each.index: each async for each in counter.count(traffic.requests, traffic.outcomes)
        }
        row = workload_row(
            self._played,
            traffic,
            counted,
            n_prefilled=n_prefilled,
            usage=await stage.end_process(),
            notes=[*self._shortcomings(), *stage.notes, *_remarks(stage, counted, n_prefilled)],
            decoded=stage.decoded,
        )
        self._progress.add(row, request_rows(self._played, traffic, counted))
        if self._conditions.draws_timelines and stage.process is not None:
            spans = timeline_folder(stage.process.folder)
            name, out = self._workload.name, self._conditions.scratch
            for path in write_timeline(name, spans, stage.windows(), out):
                self._progress.on_trouble(str(path))

    def _shortcomings(self) -> Iterator[str]:
        contender, workload = self._contender, self._workload
        if workload.calls_tools and not contender.calls_tools:
            yield "it has no tool calls: plain replies instead"
        elif self._template is not None and not contender.takes_templates:
            yield "with its own template: it takes no other"
        if workload.cache_ram_mib is not None and isinstance(contender, RemoteServer):
            yield "its memory is not limited"


def _has_to_call(stage: Stage, outcome: Outcome) -> bool:
    body = stage.traffic.requests[outcome.index].body
    return outcome.error is None and body.get("tool_choice") == "required"


def _remarks(stage: Stage, counted: dict[int, Counted], n_prefilled: int | None) -> Iterator[str]:
    errors = [each.error for each in stage.traffic.outcomes if each.error is not None]
    if errors:
        yield f"{len(errors)} failed, first: {textwrap.shorten(errors[0], MAX_ERROR_CHARS)}"
    asked = [each for each in stage.traffic.outcomes if _has_to_call(stage, each)]
    if n := sum(not (each.message or {}).get("tool_calls") for each in asked):
        yield f"{n} of {len(asked)} replies that had to call a tool did not"
    if any(each.by_characters for each in counted.values()):
        yield "floor by characters"
    n_floor = sum(each.n_floor for each in counted.values())
    if n_prefilled is not None and n_floor and n_prefilled / n_floor < BELOW_FLOOR:
        yield "below its floor: its prompts show replies differently from how they were sampled"
