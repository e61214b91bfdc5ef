"""Metrics, the trace, OpenTelemetry spans: the outcome of each request."""
