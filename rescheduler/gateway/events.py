"""What the gateway tells of one HTTP exchange, event by event."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from rescheduler.gateway.messages import ProcessingRequest

__all__ = ["Body", "Event", "Head", "ProtocolError", "Trailers", "read_event"]

_FULL_DUPLEX_STREAMED = 4
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
_SUBSET = "x-gateway-destination-endpoint-subset"


class ProtocolError(Exception):
    """Raised when the gateway says what the protocol does not allow, or is set up otherwise."""


@dataclass(frozen=True, slots=True)
class Head:
    """The headers of a request or of its response.

    Attributes:
        response: whose they are.
        headers: by name in lower case; of several of a name, the first.
        ends: there is no body.
        subset: endpoints that the request may go to; None: to any.
    """

    response: bool
    headers: Mapping[str, str]
    ends: bool
    subset: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Body:
    """A piece of a body.

    Attributes:
        response: whose it is.
        data: the bytes.
        ends: it is the last one.
    """

    response: bool
    data: bytes
    ends: bool


@dataclass(frozen=True, slots=True)
class Trailers:
    """The trailers after a body, which they end.

    Attributes:
        response: whose they are.
    """

    response: bool


Event = Head | Body | Trailers


def read_event(raw: bytes) -> Event:
    """Read a message of the gateway.

    Raises:
        ProtocolError: no such message, or the gateway does not stream bodies in full duplex.
    """
    try:
        message = ProcessingRequest.FromString(raw)
    except DecodeError as error:
        raise ProtocolError("a message is no ProcessingRequest") from error
    if message.HasField("protocol_config"):
        _check_modes(message.protocol_config)
    kind = message.WhichOneof("kind")
    if kind in ("request_body", "response_body"):
        body = getattr(message, kind)
        return Body(kind == "response_body", body.body, body.end_of_stream)
    if kind in ("request_headers", "response_headers"):
        head = getattr(message, kind)
        subset = _subset(message.metadata_context.filter_metadata)
        return Head(kind == "response_headers", _headers(head.headers), head.end_of_stream, subset)
    if kind in ("request_trailers", "response_trailers"):
        return Trailers(kind == "response_trailers")
    raise ProtocolError("a message holds neither headers nor a body nor trailers")


def _headers(given: Any) -> dict[str, str]:
    headers: dict[str, str] = {}
    for one in given.headers:
        value = one.raw_value.decode("utf-8", "replace") if one.raw_value else one.value
        headers.setdefault(one.key.lower(), value)
    return headers


def _subset(metadata: Any) -> frozenset[str] | None:
    """Return the endpoints that a gateway allows for a request; None: any."""
    if _SUBSET_NAMESPACE not in metadata or _SUBSET not in metadata[_SUBSET_NAMESPACE].fields:
        return None
    value = metadata[_SUBSET_NAMESPACE].fields[_SUBSET]
    listed = [one.string_value for one in value.list_value.values]
    return frozenset(listed or filter(None, map(str.strip, value.string_value.split(","))))


def _check_modes(config: Any) -> None:
    for field in ("request_body_mode", "response_body_mode"):
        mode = getattr(config, field)
        if mode != _FULL_DUPLEX_STREAMED:
            raise ProtocolError(
                f"the gateway's ext_proc filter has {field} {mode}; the picker needs "
                f"FULL_DUPLEX_STREAMED ({_FULL_DUPLEX_STREAMED}), to see which requests run"
            )
