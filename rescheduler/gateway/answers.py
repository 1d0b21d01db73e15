"""What the picker answers to the gateway, as bytes of `ProcessingResponse`."""

from collections.abc import Iterator, Mapping
from typing import Any

from rescheduler.gateway.events import Body, Head, Trailers
from rescheduler.gateway.messages import ProcessingResponse
from rescheduler.openai.openai_request import RequestRefusedError

__all__ = ["DESTINATION", "body_answers", "refusal", "routed", "unchanged"]

DESTINATION = "x-gateway-destination-endpoint"

_NAMESPACE = "envoy.lb"
_OVERWRITE_IF_EXISTS_OR_ADD = 2
_PIECE = 62 << 10  # Envoy recommends pieces below 64 KiB


def routed(endpoint: str, headers: Mapping[str, str]) -> bytes:
    """Return the answer to a request's headers: send it to an endpoint.

    Args:
        endpoint: ``ip:port``; it is said in a header and in the metadata, as the endpoint picker
            protocol of the Gateway API Inference Extension has it.
        headers: that the engine gets beside those of the client, in place of them.
    """
    answer = ProcessingResponse()
    response = answer.request_headers.response
    _set(response.header_mutation, {**headers, DESTINATION: endpoint})
    response.clear_route_cache = True
    metadata = answer.dynamic_metadata.fields[_NAMESPACE].struct_value
    metadata.fields[DESTINATION].string_value = endpoint
    return _bytes(answer)


def unchanged(event: Head | Trailers) -> bytes:
    """Return the answer to headers or trailers that stay as they are."""
    answer = ProcessingResponse()
    side = "response" if event.response else "request"
    name = f"{side}_{'headers' if isinstance(event, Head) else 'trailers'}"
    getattr(answer, name).SetInParent()
    return _bytes(answer)


def body_answers(body: Body) -> Iterator[bytes]:
    """Yield the answers that hand a piece of a body on as it is."""
    name = "response_body" if body.response else "request_body"
    for start in range(0, max(1, len(body.data)), _PIECE):
        answer = ProcessingResponse()
        piece = getattr(answer, name).response.body_mutation.streamed_response
        piece.SetInParent()
        piece.body = body.data[start : start + _PIECE]
        piece.end_of_stream = body.ends and start + _PIECE >= len(body.data)
        yield _bytes(answer)


def refusal(error: RequestRefusedError) -> bytes:
    """Return the answer that has the gateway refuse a request."""
    answer = ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = error.status
    headers = {"content-type": "application/json"}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    _set(immediate.headers, headers)
    immediate.body = error.body
    immediate.details = "headway_picker"
    return _bytes(answer)


def _set(mutation: Any, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        option = mutation.set_headers.add(append_action=_OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key, option.header.raw_value = name, value.encode()


def _bytes(answer: Any) -> bytes:
    data: bytes = answer.SerializeToString()
    return data
