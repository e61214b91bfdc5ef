"""`rekindle record`: a proxy that writes an agent's traffic as a trace."""

from pathlib import Path
from typing import Annotated

import typer

from rekindle.cli.plain import count, printable

DEFAULT_PORT = 8090  # next to the server's 8080; picked


def record(
    *,
    upstream: Annotated[
        str, typer.Option(metavar="URL", help="Server that answers, with or without /v1.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Trace to append to.")
    ] = Path("trace.jsonl"),
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port to listen on; 0: any.")
    ] = DEFAULT_PORT,
) -> None:
    """Pass an agent's requests to a server, and write a trace for `replay` and `lint`.

    Replies pass unchanged and at once. Keys of known names and shapes are removed; prompts stay.
    """
    import asyncio

    from rekindle.record import running

    def tell(url: str) -> None:
        typer.echo(f"Recording {upstream} to {output}. Point the agent at {url}; Ctrl-C ends.")

    recorded = asyncio.run(running.record(upstream, output, host, port, tell))
    typer.echo(printable(f"{count(recorded.n_requests, 'request')} written to {output}."))
    if recorded.failure:
        typer.echo(f"Some requests are missing: {recorded.failure}.", err=True)
        raise typer.Exit(1)
