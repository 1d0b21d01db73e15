"""The messages of Envoy's external processor protocol, and of gRPC health checks.

Only the fields that the picker reads or sets are declared; protobuf keeps the others apart. The
names and the numbers are those of the public API: ``envoy/service/ext_proc/v3``,
``envoy/config/core/v3/base.proto``, ``envoy/type/v3/http_status.proto`` and
``grpc/health/v1/health.proto``. A pool of their own keeps them from clashing with the complete
API, where that is installed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"

_TYPES = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "int32": FieldDescriptorProto.TYPE_INT32,  # on the wire an enum is one
    "string": FieldDescriptorProto.TYPE_STRING,
}

_CORE = """
HeaderValue: string key = 1, string value = 2, bytes raw_value = 3
HeaderValueOption: HeaderValue header = 1, int32 append_action = 3
HeaderMap: repeated HeaderValue headers = 1
Metadata: map google.protobuf.Struct filter_metadata = 1
"""
_EXT_PROC = """
HttpHeaders: envoy.config.core.v3.HeaderMap headers = 1, bool end_of_stream = 3
HttpBody: bytes body = 1, bool end_of_stream = 2
HttpTrailers:
ProtocolConfiguration: int32 request_body_mode = 1, int32 response_body_mode = 2
ProcessingRequest: oneof HttpHeaders request_headers = 2, oneof HttpHeaders response_headers = 3,
  oneof HttpBody request_body = 4, oneof HttpBody response_body = 5,
  oneof HttpTrailers request_trailers = 6, oneof HttpTrailers response_trailers = 7,
  envoy.config.core.v3.Metadata metadata_context = 8, ProtocolConfiguration protocol_config = 11
HeaderMutation: repeated envoy.config.core.v3.HeaderValueOption set_headers = 1
StreamedBodyResponse: bytes body = 1, bool end_of_stream = 2
BodyMutation: oneof StreamedBodyResponse streamed_response = 3
CommonResponse: HeaderMutation header_mutation = 2, BodyMutation body_mutation = 3,
  bool clear_route_cache = 5
HeadersResponse: CommonResponse response = 1
BodyResponse: CommonResponse response = 1
TrailersResponse: HeaderMutation header_mutation = 1
ImmediateResponse: envoy.type.v3.HttpStatus status = 1, HeaderMutation headers = 2, bytes body = 3,
  string details = 5
ProcessingResponse: oneof HeadersResponse request_headers = 1,
  oneof HeadersResponse response_headers = 2, oneof BodyResponse request_body = 3,
  oneof BodyResponse response_body = 4, oneof TrailersResponse request_trailers = 5,
  oneof TrailersResponse response_trailers = 6, oneof ImmediateResponse immediate_response = 7,
  google.protobuf.Struct dynamic_metadata = 8
"""


def _file(package: str, messages: str, *imports: str) -> FileDescriptorProto:
    """Return a file of messages, each written as ``Name: label type field = number, ...``."""
    file = FileDescriptorProto(
        name=f"{package}.proto", package=package, dependency=imports, syntax="proto3"
    )
    for line in messages.strip().replace("\n  ", " ").splitlines():
        name, _, fields = line.partition(":")
        message = file.message_type.add(name=name)
        for text in filter(None, map(str.strip, fields.split(","))):
            _add_field(message, package, text)
    return file


def _add_field(message: DescriptorProto, package: str, text: str) -> None:
    *label, kind, name, _, number = text.split()
    field = message.field.add(name=name, number=int(number))
    field.label = FieldDescriptorProto.LABEL_OPTIONAL
    if kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{kind}" if "." in kind else f".{package}.{kind}"
    if label == ["oneof"]:
        if not message.oneof_decl:
            message.oneof_decl.add(name="kind")
        field.oneof_index = 0
    elif label:
        field.label = FieldDescriptorProto.LABEL_REPEATED
    if label == ["map"]:
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, package, "string key = 1")
        _add_field(entry, package, f"{kind} value = 2")
        field.type_name = f".{package}.{message.name}.{entry.name}"


def _pool() -> DescriptorPool:
    struct = FileDescriptorProto()
    struct_pb2.DESCRIPTOR.CopyToProto(struct)
    core, status, health = "envoy.config.core.v3", "envoy.type.v3", "grpc.health.v1"
    pool = DescriptorPool()
    for file in (
        struct,
        _file(core, _CORE, struct.name),
        _file(status, "HttpStatus: int32 code = 1"),
        _file(
            "envoy.service.ext_proc.v3",
            _EXT_PROC,
            *(struct.name, f"{core}.proto", f"{status}.proto"),
        ),
        _file(
            health,
            "HealthCheckRequest: string service = 1\nHealthCheckResponse: int32 status = 1",
        ),
    ):
        pool.Add(file)
    return pool


_POOL = _pool()


def _message(name: str) -> Any:
    return GetMessageClass(_POOL.FindMessageTypeByName(name))


ProcessingRequest = _message("envoy.service.ext_proc.v3.ProcessingRequest")
ProcessingResponse = _message("envoy.service.ext_proc.v3.ProcessingResponse")
HealthCheckRequest = _message("grpc.health.v1.HealthCheckRequest")
HealthCheckResponse = _message("grpc.health.v1.HealthCheckResponse")


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
    """A piece of a body, the last one if it ends it."""

    response: bool
    data: bytes
    ends: bool


@dataclass(frozen=True, slots=True)
class Trailers:
    """The trailers after a body, which they end."""

    response: bool


Event = Head | Body | Trailers


def read_event(raw: bytes) -> Event:
    """Read a message of the gateway, or raise `ProtocolError`: it has to stream in full duplex."""
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
