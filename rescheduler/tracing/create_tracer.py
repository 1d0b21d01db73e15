"""The tracer of a deployment."""

import os

from rescheduler.engines.deployment import DeploymentError, TraceOptions
from rescheduler.tracing.span import Tracer

__all__ = ["create_tracer"]


def create_tracer(options: TraceOptions | None) -> Tracer:
    """Create the tracer; without options OpenTelemetry is not even imported.

    Raises:
        DeploymentError: OpenTelemetry is not installed, or finds fault with its own variables.
    """
    if options is None or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return Tracer()
    try:
        from rescheduler.tracing.exporter import otlp_exporter
        from rescheduler.tracing.otlp_tracer import OtlpTracer
    except ModuleNotFoundError as error:
        raise DeploymentError(
            f"proxy.traces: {error.name} is missing: pip install 'headway[traces]'"
        ) from error
    try:
        return OtlpTracer(options, otlp_exporter(options))
    except Exception as error:  # its variables are read in many places
        raise DeploymentError(f"proxy.traces: {error}; see the OTEL_ variables") from error
