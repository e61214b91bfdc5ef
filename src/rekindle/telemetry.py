"""The server's own counters, in a Prometheus registry that belongs to one server.

Written from the event loop only. Every label has a bounded set of values.
"""

import re
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from rekindle.generation import EngineStatus

MAX_FIELD_NAMES = 100  # picked: real clients send a few dozen between them
OTHER = "other"
FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,79}")


class Telemetry:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rekindle_http_requests",
            "Requests answered, by route and status.",
            ["route", "status"],
            registry=self._registry,
        )
        self._in_flight = Gauge(
            "rekindle_http_requests_in_flight",
            "Requests being answered now.",
            registry=self._registry,
        )
        self._prompt_tokens = Counter(
            "rekindle_prompt_tokens",
            "Prompt tokens of all complete replies.",
            registry=self._registry,
        )
        self._cached_tokens = Counter(
            "rekindle_cached_tokens",
            "Prompt tokens that were taken from the cache.",
            registry=self._registry,
        )
        self._generated_tokens = Counter(
            "rekindle_generated_tokens", "Tokens of all complete replies.", registry=self._registry
        )
        self._ignored_fields = Counter(
            "rekindle_ignored_fields",
            "Request fields that this server does not know, by name.",
            ["field"],
            registry=self._registry,
        )
        self._field_names: set[str] = set()

    def watch(self, status: Callable[[], EngineStatus]) -> None:
        """Gauges that are read from the engine whenever someone looks."""

        def gauge(name: str, about: str, read: Callable[[], float]) -> None:
            Gauge(name, about, registry=self._registry).set_function(read)

        gauge("rekindle_slots", "Requests that can run at once.", lambda: status().n_slots)
        gauge("rekindle_slots_busy", "Requests that run now.", lambda: status().n_running)
        gauge("rekindle_requests_waiting", "Requests without a slot.", lambda: status().n_waiting)
        gauge("rekindle_cells", "Positions that the context holds.", lambda: status().n_cells)
        gauge("rekindle_cells_used", "Of these, taken now.", lambda: status().n_cells_used)

    def request_began(self) -> None:
        self._in_flight.inc()

    def request_ended(self, *, route: str, status: int) -> None:
        self._in_flight.dec()
        self._requests.labels(route=route, status=str(status)).inc()

    def count_reply(self, *, n_prompt: int, n_cached: int, n_generated: int) -> None:
        self._prompt_tokens.inc(n_prompt)
        self._cached_tokens.inc(n_cached)
        self._generated_tokens.inc(n_generated)

    def count_ignored_field(self, name: str) -> None:
        self._ignored_fields.labels(field=self._bounded(name)).inc()

    def render(self) -> bytes:
        """The text exposition format that `GET /metrics` serves."""
        return generate_latest(self._registry)

    def _bounded(self, name: str) -> str:
        if name in self._field_names:
            return name
        if len(self._field_names) == MAX_FIELD_NAMES or not FIELD_NAME.fullmatch(name):
            return OTHER
        self._field_names.add(name)
        return name
