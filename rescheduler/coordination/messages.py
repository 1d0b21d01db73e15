"""What a proxy and the coordinator say to each other; never pickle.

A ZMQ message is two frames: `TOPIC`, which names the version of this schema, and a `Report` of a
proxy or a `Notice` of the coordinator as MessagePack.

Both ends number what they send. What is lost, late or doubled is noticed by the numbers, and mended
by a report that is whole: a report says how requests are, not what has happened to them. So a
report that comes twice, or one in place of three that are lost, leads to the same end.
"""

from typing import Annotated, Any

import msgspec

__all__ = [
    "MOST",
    "NOWHERE",
    "TOPIC",
    "Answer",
    "CoordinationError",
    "Ended",
    "Failure",
    "MoveEnded",
    "MoveOrder",
    "Notice",
    "ProxyLoad",
    "Record",
    "Refusal",
    "Report",
    "View",
    "decode_load",
    "decode_notice",
    "decode_report",
    "encode",
]

TOPIC = b"headway-coordination/1"
"""The first frame of every message: name and version of the schema."""

NOWHERE = -1
"""In place of an instance's index in the deployment."""

MOST = 2**40
"""Largest number in a message; no count of requests, tokens or messages comes near it."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Index = Annotated[int, msgspec.Meta(ge=NOWHERE, le=MOST)]
Duration = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]  # and no NaN
Session = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class CoordinationError(RuntimeError):
    """A message that cannot be used."""


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request, as it is.

    Attributes:
        handle: number of the request in its proxy's session.
        id: the migration id.
        name: what its client calls it.
        external_id: what engines call it.
        ticket: of the place that it waits for; 0 if it waits for none.
        for_prefill: whether that is a place on a prefill instance.
        waited: seconds that it has waited for it.
        instance: index of the instance that it is on.
        destination: of the one that it is on, or on its way to.
        hop: number of its placement on decode instances; each move raises it.
        prompt_tokens: of its prompt, perhaps estimated.
        generated_tokens: so far.
        generated_at_move: when it last moved; None if it has not.
        max_tokens: that it may generate, if its client said so; at most `MOST`.
        movable: whether it can ever move.
        several: whether it asks for several answers, or has several prompts.
        can_move: whether it can move now.
        moving: whether the proxy carries out an order to move it.
        generating: whether its instance has generated a token.
        on_its_way: whether its instance has not accepted it yet.
        avoid: instances that its proxy cannot reach, that have failed it, or turned it away.
    """

    handle: Count
    id: str
    name: str
    external_id: str
    ticket: Count
    for_prefill: bool
    waited: Duration
    instance: Index
    destination: Index
    hop: Index
    prompt_tokens: Count
    generated_tokens: Count
    generated_at_move: Count | None
    max_tokens: Count | None
    movable: bool
    several: bool
    can_move: bool
    moving: bool
    generating: bool
    on_its_way: bool
    avoid: list[Count]


class Ended(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request that is over.

    Attributes:
        handle: of its record.
        by_itself: whether its length tells of others': no client or fault cut it.
        generated_tokens: in all.
    """

    handle: Count
    by_itself: bool
    generated_tokens: Count


class MoveEnded(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How an order to move a request ended.

    Attributes:
        handle: of its record.
        hop: that the order named.
        outcome: ``moved``, or why it stays.
        pause: seconds from the last token at the source to the first at the target, if it moved.
    """

    handle: Count
    hop: Index
    outcome: str
    pause: Duration | None = None


class Failure(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A failure that counts against an instance.

    Attributes:
        instance: its index.
        certain: nothing listens there.
    """

    instance: Count
    certain: bool


class Report(msgspec.Struct, array_like=True, frozen=True):
    """What a proxy says.

    Attributes:
        session: of the proxy's process.
        number: of this report in the session, from 1.
        incarnation: of the session with the coordinator, as it heard last.
        heard: number of the last notice from it.
        deployment: digest of the instances' names; it must be the coordinator's.
        listening: endpoint at which its peers hear its loads.
        whole: whether all of its requests are in here; others are over.
        records: of requests that have changed.
        ended: requests that are over.
        moves: orders that have been carried out, or refused.
        failures: that count against instances.
        handles: [n] int64 as bytes, requests whose tokens follow.
        tokens: [n] int64 as bytes, generated so far.
        step_seconds: mean time between two tokens of a request.
        draining: instances that drain, as the coordinator that it heard last said.
    """

    session: Session
    number: Count
    incarnation: str
    heard: Count
    deployment: str
    listening: str
    whole: bool = False
    records: list[Record] = []
    ended: list[Ended] = []
    moves: list[MoveEnded] = []
    failures: list[Failure] = []
    handles: bytes = b""
    tokens: bytes = b""
    step_seconds: Duration = 0.0
    draining: list[Count] = []


class Refusal(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Why a request gets no place.

    Attributes:
        status: for its client, as in HTTP.
        message: for its client.
        retry_after: seconds.
    """

    status: int
    message: str
    retry_after: int | None


class Answer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A place for a request.

    Attributes:
        ticket: that it waits with.
        instance: index; `NOWHERE` if no prefill instance is in service.
        refusal: in its place.
    """

    ticket: Count
    instance: Index
    refusal: Refusal | None = None


class MoveOrder(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An order to move a request, void if it is elsewhere by now.

    Attributes:
        handle: of its record.
        hop: placement that it leaves.
        source: index of the instance that it leaves.
        target: of the instance that it goes to.
        why: for the proxy's log.
    """

    handle: Count
    hop: Index
    source: Count
    target: Count
    why: str


class ProxyLoad(msgspec.Struct, array_like=True, frozen=True):
    """What one proxy has on each instance, in the order of the deployment.

    Attributes:
        session: of the proxy.
        listening: endpoint at which its peers hear it.
        requests: [n_instances].
        tokens: [n_instances] of their contexts.
    """

    session: Session
    listening: str
    requests: list[Count]
    tokens: list[Count]


class View(msgspec.Struct, array_like=True, frozen=True):
    """The cluster, as the coordinator knows it.

    Attributes:
        draining: [n_instances] whether each gets no new requests.
        waiting: requests of all proxies that wait for a place.
        proxies: all that it knows.
    """

    draining: list[bool]
    waiting: Count
    proxies: list[ProxyLoad]


class Notice(msgspec.Struct, array_like=True, frozen=True):
    """What the coordinator says.

    Attributes:
        incarnation: of the coordinator's session with this proxy.
        number: of this notice in the session, from 1.
        whole_please: it has missed a report.
        answers: places.
        moves: orders.
        view: a few times a second, once the coordinator decides.
        refused: why it does not work with this proxy; None if it does.
    """

    incarnation: str
    number: Count
    whole_please: bool = False
    answers: list[Answer] = []
    moves: list[MoveOrder] = []
    view: View | None = None
    refused: str | None = None


_encoder = msgspec.msgpack.Encoder()
_reports = msgspec.msgpack.Decoder(Report)
_notices = msgspec.msgpack.Decoder(Notice)
_loads = msgspec.msgpack.Decoder(ProxyLoad)


def encode(message: Report | Notice | ProxyLoad) -> list[bytes]:
    """Return the frames of a message."""
    return [TOPIC, _encoder.encode(message)]


def decode_report(frames: list[bytes]) -> Report:
    """Read a report.

    Raises:
        CoordinationError: another version of the schema, or no report.
    """
    report: Report = _decoded(frames, _reports)
    return report


def decode_notice(frames: list[bytes]) -> Notice:
    """Read a notice.

    Raises:
        CoordinationError: another version of the schema, or no notice.
    """
    notice: Notice = _decoded(frames, _notices)
    return notice


def decode_load(frames: list[bytes]) -> ProxyLoad:
    """Read what a peer has on the instances.

    Raises:
        CoordinationError: another version of the schema, or no load.
    """
    load: ProxyLoad = _decoded(frames, _loads)
    return load


def _decoded(frames: list[bytes], decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    if len(frames) != 2:
        raise CoordinationError(f"{len(frames)} frames, not a topic and a message")
    if frames[0] != TOPIC:
        raise CoordinationError(
            f"the other side speaks {frames[0][:40]!r}, this one {TOPIC.decode()}: update one"
        )
    try:
        return decoder.decode(frames[1])
    except (msgspec.DecodeError, RecursionError, ValueError) as error:  # ValueError: UTF-8
        raise CoordinationError(f"invalid message: {error}") from error
