"""Invented runs of the benchmark."""

from dataclasses import replace

from rekindle.bench.report.results import BurstRow, MeasuredServer, RequestRow, Run, WorkloadRow


def workload_row(workload: str, server: str, **fields: object) -> WorkloadRow:
    row = WorkloadRow(
        workload=workload,
        server=server,
        round=1,
        requests=12,
        errors=0,
        prompt_tokens=40_000,
        prefilled_tokens=5_100,
        floor_tokens=5_000,
        amplification=1.02,
        first_token_p50_seconds=0.05,
        first_token_p95_seconds=0.4,
        total_seconds=8.25,
        tokens_per_second=4_900.0,
        written_bytes=3 * 1024 * 1024,
        peak_memory_bytes=400 * 1024 * 1024,
        note=None,
    )
    return replace(row, **fields)  # type: ignore[arg-type]


def silent_row(workload: str, server: str, **fields: object) -> WorkloadRow:
    """Return the row of a server that reports nothing."""
    nothing = dict.fromkeys(
        (
            "prompt_tokens",
            "prefilled_tokens",
            "floor_tokens",
            "amplification",
            "first_token_p50_seconds",
            "first_token_p95_seconds",
            "total_seconds",
            "tokens_per_second",
            "written_bytes",
            "peak_memory_bytes",
        )
    )
    return workload_row(workload, server, **(nothing | fields))


def request_row(workload: str, server: str, **fields: object) -> RequestRow:
    row = RequestRow(
        workload=workload,
        server=server,
        round=1,
        request="turn 1",
        start_seconds=0.125,
        seconds=0.5,
        first_token_seconds=0.05,
        prompt_tokens=900,
        cached_tokens=800,
        prefilled_tokens=100,
        floor_tokens=100,
        reply_tokens=16,
        error=None,
    )
    return replace(row, **fields)  # type: ignore[arg-type]


def burst_row(server: str, value: float, **fields: object) -> BurstRow:
    row = BurstRow(
        measure="decode_tokens_per_second", streams=1, server=server, round=1, value=value
    )
    return replace(row, **fields)  # type: ignore[arg-type]


def run_of(
    *workloads: WorkloadRow,
    servers: tuple[str, ...] = ("rekindle", "peer"),
    requests: tuple[RequestRow, ...] = (),
    bursts: tuple[BurstRow, ...] = (),
    machine: str = "Some processor, 2 cores",
) -> Run:
    return Run(
        machine=machine,
        model="tiny.gguf",
        commit="abc1234",
        command="rekindle bench --rounds 3",
        contenders=tuple(MeasuredServer(server, "1.0") for server in servers),
        requests=requests,
        workloads=workloads,
        bursts=bursts,
    )
