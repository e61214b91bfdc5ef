"""Recorded clients: requests that real clients sent, one after the other, with short replies.

A recorded history holds the replies of that time, not those of this server. Therefore requests
share only the texts of the client, not replies.
"""

from dataclasses import replace
from pathlib import Path

from rekindle.bench.stage import Stage
from rekindle.bench.workloads.workloads import Workload
from rekindle.replay.client import LIMITS
from rekindle.replay.traffic import ReplayRequest, read_traffic

RECORDED = Path(__file__).parent / "traces" / "clients.jsonl.gz"
REPLY_TOKENS = 8
OTHER_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")


def recorded_workload(trace: Path | None) -> Workload:
    """Return the workload that sends a recorded trace. None: the sample of this package."""

    async def play(stage: Stage) -> None:
        requests = read_traffic([trace or RECORDED]).requests
        for request in requests[: stage.times(len(requests))]:
            await stage.send_request(_shortened(request, calls_tools=stage.calls_tools))

    return Workload(
        name="recorded",
        about="requests that real clients sent, one after the other",
        play=play,
        calls_tools=True,
    )


def _shortened(request: ReplayRequest, *, calls_tools: bool) -> ReplayRequest:
    left_out = OTHER_LIMITS if calls_tools else (*OTHER_LIMITS, *TOOL_FIELDS)
    body = {name: value for name, value in request.body.items() if name not in left_out}
    return replace(request, body={**body, LIMITS[request.path]: REPLY_TOKENS, "temperature": 0})
