"""One workload on one server: a fresh process in an empty folder, the traffic, the counts.

What a server cannot do becomes a note, and never ends the run.
"""

import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rekindle.bench.peers.contenders import Contender, Flags, RemoteServer
from rekindle.bench.peers.processes import DidNotStart, ProcessUsage, ServerProcess
from rekindle.bench.report.results import RequestRow, WorkloadRow
from rekindle.bench.report.rows import Played, nothing_row, request_rows, workload_row
from rekindle.bench.stage import Size, Stage
from rekindle.bench.workloads.texts import Texts
from rekindle.bench.workloads.workloads import Workload
from rekindle.errors import StartupError
from rekindle.replay.client import Outcome
from rekindle.replay.prompts import Counted, FloorCounter

MAX_ERROR_CHARS = 160  # of a note; picked
BELOW_FLOOR = 0.99  # picked: the few tokens of replies that we do not know are no news


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The same for every server and workload."""

    model: Path
    shows_tools: bool  # the model's own template does; ours is not needed for that
    threads: int
    texts: Texts
    is_quick: bool
    scratch: Path  # on a disk, for the folders of servers


@dataclass(frozen=True, slots=True)
class Results:
    """Of one play."""

    workload: WorkloadRow
    requests: Sequence[RequestRow] = ()


class Play:
    def __init__(
        self,
        contender: Contender,
        workload: Workload,
        round_number: int,
        conditions: Conditions,
        on_request: Callable[[str], None],
    ) -> None:
        self._contender = contender
        self._workload = workload
        self._conditions = conditions
        self._played = Played(workload.name, contender.name, round_number)
        self._template = workload.template_for(shows_tools=conditions.shows_tools)
        self._on_request = on_request

    async def run(self, on_end: Callable[[Results], None]) -> None:
        """`on_end` comes also after Ctrl-C, with what was answered."""
        async with AsyncExitStack() as stack:
            try:
                self._on_request("starting")
                process = await self._process(stack)
                stage = self._stage(process)
                stack.push_async_callback(stage.close)
                await stage.open()
            except (DidNotStart, StartupError) as error:
                on_end(Results(nothing_row(self._played, error.message)))
                return
            try:
                await self._workload.play(stage)
            except (DidNotStart, StartupError) as error:  # after the kill in the middle
                stage.notes.append(error.message)
            finally:
                self._on_request("counting the floor")
                on_end(await self._conclude(stage, process))

    async def _process(self, stack: AsyncExitStack) -> ServerProcess | None:
        if isinstance(self._contender, RemoteServer):
            return None
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=self._conditions.scratch))
        flags = Flags(
            model=self._conditions.model,
            ctx_size=self._workload.ctx_size,
            parallel=self._workload.parallel,
            threads=self._conditions.threads,
            cache_ram_mib=self._workload.cache_ram_mib,
            chat_template=self._template,
        )
        process = ServerProcess(self._contender, flags, Path(folder))
        stack.push_async_callback(process.end)
        await process.start()
        return process

    def _stage(self, process: ServerProcess | None) -> Stage:
        contender = self._contender
        return Stage(
            self._url(process),
            process=process,
            texts=self._conditions.texts,
            size=Size(n_slots=self._workload.parallel, is_quick=self._conditions.is_quick),
            calls_tools=contender.calls_tools,
            on_request=self._on_request,
        )

    def _url(self, process: ServerProcess | None) -> str:
        if isinstance(self._contender, RemoteServer):
            return self._contender.url
        assert process is not None
        return process.url

    async def _conclude(self, stage: Stage, process: ServerProcess | None) -> Results:
        # At once: what is computed ahead from now on is for a turn that never comes.
        n_prefilled = await stage.n_prefilled()
        stage.read_log()
        if n_prefilled is None:
            n_prefilled = stage.n_prefilled_as_told()
        counted = await _floor(stage)
        if process is not None:
            await process.end()
        row = workload_row(
            self._played,
            stage.traffic,
            counted,
            n_prefilled=n_prefilled,
            usage=process.usage if process is not None else ProcessUsage(),
            notes=[*self._shortcomings(), *stage.notes, *_remarks(stage, counted, n_prefilled)],
        )
        return Results(row, request_rows(self._played, stage.traffic, counted))

    def _shortcomings(self) -> Iterator[str]:
        contender, workload = self._contender, self._workload
        if workload.calls_tools and not contender.calls_tools:
            yield "it knows no tool calls: plain replies instead"
        elif self._template is not None and not contender.takes_templates:
            yield "with its own template: it takes no other"
        if workload.cache_ram_mib is not None and isinstance(contender, RemoteServer):
            yield "its memory is not limited"


async def _floor(stage: Stage) -> dict[int, Counted]:
    counter = FloorCounter(stage.server)
    return {
        each.index: each
        async for each in counter.count(stage.traffic.requests, stage.traffic.outcomes)
    }


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
        yield "below its floor: it shows replies otherwise than they were said"
