"""Metrics, the trace, OpenTelemetry spans: what became of each request."""
