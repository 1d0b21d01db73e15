"""Traces: where a request's time went, as spans for an OpenTelemetry collector."""
