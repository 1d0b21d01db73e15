"""What an engine publishes about its running requests, as typed MessagePack; never pickle.

A ZMQ message is two frames: `TOPIC`, which names the version of this schema, and one of
`Snapshot`, `Forecasts` and `Finished`.

A message beyond the bounds below is refused where it is read: none makes a reader slow, and no sum
of what many engines say overflows.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

TOPIC = b"headway/1"
"""The first frame of every message: name and version of the schema."""

LARGEST_MESSAGE = 16 << 20
"""Bytes of a message, at most."""

MOST_EDGES = 512
"""Edges of a grid, at most; `survival_edges` gives 159 to a model of 2**30 tokens."""

MOST_REQUESTS = 8192
"""Requests of a message, at most."""

MOST_TOKENS = 1 << 40
"""Tokens of a request, of a KV cache or of a budget, at most."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
Length = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
Requests = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Budget = Annotated[float, msgspec.Meta(ge=-float(MOST_TOKENS), le=float(MOST_TOKENS))]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Edges = Annotated[list[Tokens], msgspec.Meta(min_length=2, max_length=MOST_EDGES)]
_SCALE = 65_535


class TelemetryError(ValueError):
    """Bytes that are no telemetry message, or an endpoint or keys that telemetry cannot use."""


class Gauges(msgspec.Struct, frozen=True, array_like=True):
    """State of an engine.

    Attributes:
        running: requests in the running batch.
        waiting: requests that wait to be scheduled.
        kv_usage: share of the KV cache in use, 0 to 1.
        kv_capacity_tokens: tokens the KV cache holds.
        prefill_budget: tokens of new prompts that it can still compute in time, below 0 when it
            has taken on too much; None if its scheduler does not reckon it.
        failures: times that Headway's part in its scheduler failed, and vLLM's own rule was used.
    """

    running: Requests = 0
    waiting: Requests = 0
    kv_usage: Share = 0.0
    kv_capacity_tokens: Tokens = 0
    prefill_budget: Budget | None = None
    failures: Count = 0


class RequestForecast(msgspec.Struct, frozen=True, array_like=True):
    """A running request and its latest forecast.

    Attributes:
        request_id: id inside the engine.
        prompt_tokens: length of the prompt.
        generated_tokens: n when the message was sent.
        forecast_at: n when the forecast was made.
        tokens_left: tokens to ``max_tokens`` when the forecast was made.
        survival: the curve at the grid's edges, see `encode_survival`; the age since
            ``forecast_at`` is not in it.
    """

    request_id: Id
    prompt_tokens: Length
    generated_tokens: Length
    forecast_at: Length
    tokens_left: Tokens
    survival: bytes


class FinishedEvent(msgspec.Struct, frozen=True, array_like=True):
    """A request that ended, with its true length.

    Attributes:
        request_id: id inside the engine.
        finish_reason: ``stop``, ``length``, ``abort``, ``error`` or ``repetition``, or ``moved`` if
            another engine continues it.
        prompt_tokens: length of the prompt.
        total_tokens: tokens generated.
        max_tokens: the cap the request asked for.
    """

    request_id: Id
    finish_reason: Name
    prompt_tokens: Length
    total_tokens: Length
    max_tokens: Tokens


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    """Who sent a message, and where it stands among its others.

    Attributes:
        instance: name of the engine.
        rank: its data-parallel rank.
        epoch: nanoseconds since 1970 at which the publisher started, which tells its lives apart.
        seq: number of the message within the epoch, from 0, over all kinds.
        step: engine steps so far.
        time: seconds since 1970.
    """

    instance: Name
    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    epoch: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    seq: Count
    step: Count
    time: float


class Snapshot(_Header, frozen=True, kw_only=True, tag="snapshot"):
    """Everything that runs: on every k-th step, and each second also when idle.

    Attributes:
        gauges: state of the engine.
        model: name of the serving model.
        checkpoint: fingerprint of the predictor, see `SurvivalMLP.fingerprint`.
        k: steps between two predictions.
        edges: [n_edges] the grid of the curves, in tokens.
        requests: every running request that has a forecast.
    """

    gauges: Gauges
    model: Annotated[str, msgspec.Meta(max_length=4096)]
    checkpoint: Name
    k: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    edges: Edges
    requests: Annotated[list[RequestForecast], msgspec.Meta(max_length=MOST_REQUESTS)]


class Forecasts(_Header, frozen=True, kw_only=True, tag="forecasts"):
    """Requests that were just prefilled, with their first forecast.

    Attributes:
        edges: [n_edges] the grid of the curves, in tokens.
        requests: the new requests.
    """

    edges: Edges
    requests: Annotated[list[RequestForecast], msgspec.Meta(max_length=MOST_REQUESTS)]


class Finished(_Header, frozen=True, kw_only=True, tag="finished"):
    """Requests that ended.

    Attributes:
        requests: how each ended.
    """

    requests: Annotated[list[FinishedEvent], msgspec.Meta(max_length=MOST_REQUESTS)]


Message = Snapshot | Forecasts | Finished

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """Return the second frame of a message."""
    return _encoder.encode(message)


def decode_message(payload: bytes) -> Message:
    """Read the second frame of a message.

    Raises:
        TelemetryError: it is not a message of this schema, it is beyond the bounds, or a curve does
            not fit the grid.
    """
    if len(payload) > LARGEST_MESSAGE:
        raise TelemetryError(f"a message of {len(payload)} bytes, more than {LARGEST_MESSAGE}")
    try:
        message: Message = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TelemetryError(f"not a telemetry message: {error}") from error
    if not isinstance(message, Finished):
        edges = np.array(message.edges, dtype=np.float64)
        if edges[0] != 0 or (np.diff(edges) <= 0).any():
            raise TelemetryError(f"edges {message.edges[:5]}... do not ascend from 0")
        decode_survival([request.survival for request in message.requests], len(edges))
        for request in message.requests:
            if request.generated_tokens < request.forecast_at:
                raise TelemetryError(f"{request.request_id} is younger than its forecast")
    return message


def encode_survival(survival: npt.NDArray[np.floating]) -> list[bytes]:
    """Code curves [n_requests, n_edges] as 16-bit shares of 65,535, little endian."""
    coded = np.rint(np.clip(survival, 0, 1) * _SCALE).astype("<u2")
    return [row.tobytes() for row in coded]


def decode_survival(coded: Sequence[bytes], n_edges: int) -> npt.NDArray[np.float64]:
    """Return the curves [n_requests, n_edges], within 1/131,070 of what was coded.

    Raises:
        TelemetryError: a curve has another length, does not start at 1, or rises.
    """
    for curve in coded:
        if len(curve) != 2 * n_edges:
            raise TelemetryError(f"a curve of {len(curve)} bytes on a grid of {n_edges} edges")
    values = np.frombuffer(b"".join(coded), dtype="<u2").reshape(len(coded), n_edges)
    if (values[:, 0] != _SCALE).any() or (values[:, 1:] > values[:, :-1]).any():
        raise TelemetryError("a curve that does not start at 1, or rises")
    return values.astype(np.float64) / _SCALE
