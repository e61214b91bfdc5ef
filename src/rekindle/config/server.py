"""Settings of the server."""

# ruff: noqa: FBT003, RUF009 - `setting` declares a dataclass field, and a default may be a bool.

from dataclasses import dataclass
from pathlib import Path

from rekindle.config.choices import LogLevel
from rekindle.config.declare import KIB, MIB, TIB, Bytes, setting

_DAY = 86400.0
# By llama.cpp's number.
_VERBOSITY = {
    **dict.fromkeys(("0", "1"), LogLevel.ERROR),
    "2": LogLevel.WARNING,
    "3": LogLevel.INFO,
    **dict.fromkeys(("4", "5"), LogLevel.DEBUG),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8080, "Port to listen on.", minimum=1, maximum=65535)
    api_key: tuple[str, ...] = setting(
        (), "API key that clients must send; may be repeated.", secret=True, splits=True
    )
    api_key_file: Path | None = setting(
        None, "File with one key per line; lines that start with # are comments."
    )
    admin_key: str | None = setting(
        None,
        "Key for unloading models, deleting everything and pinning stored prompts. Default: every"
        " client may.",
        secret=True,
    )
    admin_metrics: bool = setting(False, "Only --admin-key may read /metrics.")
    cors: tuple[str, ...] = setting(
        (), "Origin of web pages that may call this server; may be repeated.", splits=True
    )
    allowed_hosts: tuple[str, ...] = setting(
        (), "Name of this server in URLs, beside localhost and addresses; may be repeated."
    )
    body_limit: Bytes = setting(Bytes(32 * MIB), "Largest request body.", minimum=KIB, maximum=TIB)
    max_connections: int = setting(
        1024, "Connections with a running request; further ones get a 503.", minimum=1
    )
    receive_timeout: float = setting(
        20.0,
        "Seconds for the headers of a request to arrive, and for each pause in its body.",
        minimum=0.1,
        maximum=_DAY,
    )
    slots: bool = setting(True, "Serve GET /slots.")
    ui: bool = setting(True, "Serve the dashboard at /.")
    explain: bool = setting(
        False, "Report in every reply why a part of its prompt missed the cache."
    )
    usage_window: tuple[str, ...] = setting(
        (),
        "TOKENS or CLIENT=TOKENS: a window that clients believe in (CLIENT: part of their"
        " User-Agent). Their usage is scaled from the real context to it; may be repeated.",
    )
    shutdown_grace: float = setting(
        10.0, "Seconds that running requests get to finish at shutdown.", maximum=_DAY
    )
    ping_interval: float = setting(
        10.0,
        "Seconds between keep-alive comments in a stream.",
        minimum=0.1,
        maximum=_DAY,
        words={"-1": _DAY},
    )
    log_level: LogLevel = setting(LogLevel.INFO, "Lowest severity to log.", words=_VERBOSITY)
    trace: Path | None = setting(
        None, "File that gets one line per reply, with up to 80 characters of its prompt."
    )
    trace_prompts: bool = setting(
        False, "Write whole prompts and requests to the trace: everything that clients send."
    )
    trace_size: Bytes = setting(
        Bytes(100 * MIB),
        "Maximum size of the trace. After that a new file begins, and one old file is kept.",
        minimum=MIB,
        maximum=1024 * TIB,
    )
    otel: bool = setting(
        False, "Send spans to OpenTelemetry. Also on when OTEL_EXPORTER_OTLP_ENDPOINT is set."
    )
