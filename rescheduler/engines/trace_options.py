"""Where traces go, and of how many requests."""

from typing import Annotated
from urllib.parse import urlsplit

import msgspec

__all__ = ["TraceOptions"]


class TraceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Traces of requests for an OpenTelemetry collector.

    Attributes:
        endpoint: of the collector: ``http://HOST:4317`` for OTLP over gRPC, and with a path,
            ``http://HOST:4318/v1/traces``, over HTTP; ``https`` encrypts.
        sample: share of the requests that are traced, drawn at random.
        trust_clients: a request whose client sends ``traceparent`` is traced if that says so, and
            not otherwise; else only its trace's id is taken over.
    """

    endpoint: str
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01
    trust_clients: bool = False

    @property
    def protocol(self) -> str:
        """How the collector is spoken to, in the words of ``OTEL_EXPORTER_OTLP_PROTOCOL``."""
        has_path = urlsplit(self.endpoint).path not in ("", "/")
        return "http/protobuf" if has_path else "grpc"
