"""What a proxy and the coordinator say to each other; never pickle.

A ZMQ message is two frames: `TOPIC`, which names the version of this schema, and a `Report` of a
proxy or a `Notice` of the coordinator as MessagePack.

Both ends number what they send. What is lost, late or doubled is noticed by the numbers, and mended
by a report that is whole: a report says how requests are, not what has happened to them. So a
report that comes twice, or one in place of three that are lost, leads to the same end.
"""

from typing import Annotated, Any, Literal

import msgspec

from rescheduler.coordination.refused_messages import Reason

__all__ = [
    "LARGEST_MESSAGE",
    "MOST",
    "MOST_ANSWERS",
    "MOST_FAILURES",
    "MOST_INSTANCES",
    "MOST_ORDERS",
    "MOST_REQUESTS",
    "MOST_SESSIONS",
    "MOST_TOKENS",
    "MOST_UNREAD",
    "NOWHERE",
    "TOPIC",
    "Answer",
    "CoordinationError",
    "Count",
    "Duration",
    "Ended",
    "Failure",
    "Index",
    "Load",
    "MoveEnded",
    "MoveOrder",
    "Notice",
    "Outcome",
    "ProxyLoad",
    "Record",
    "Refusal",
    "Report",
    "Requests",
    "StepSeconds",
    "Text",
    "Tokens",
    "View",
    "Word",
    "decode_load",
    "decode_notice",
    "decode_report",
    "encode",
]


LARGEST_MESSAGE = 8 << 20
"""Bytes of a message; a connection that sends a larger one is closed."""

MOST_UNREAD = 64
"""Messages of one connection that wait to be sent or read; what does not fit is lost."""

MOST_SESSIONS = 64
"""Proxies of one coordinator."""

MOST_REQUESTS = 16_384
"""Requests of one proxy, four times as many as it can relay tokens for."""

MOST_INSTANCES = 4_096
"""Instances of a deployment."""

MOST_ANSWERS, MOST_ORDERS, MOST_FAILURES = 1_024, 256, 64
"""Places, orders to move and failed calls in one message; others come in the next."""

MOST_TOKENS = 2**24
"""Tokens of a prompt, or of an answer."""

MOST = 2**40
"""Largest number of any message: no count of requests, tokens or messages comes near it."""

NOWHERE = -1
"""In place of an instance's index in the deployment."""

_PRINTABLE = (  # neither control characters nor those that change the order or are not seen
    r"^[^\x00-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]*\Z"
)

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
Requests = Annotated[int, msgspec.Meta(ge=0, le=MOST_REQUESTS)]
Index = Annotated[int, msgspec.Meta(ge=NOWHERE, lt=MOST_INSTANCES)]
Duration = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]  # and no NaN
StepSeconds = Annotated[float, msgspec.Meta(ge=0.0, le=60.0)]
Word = Annotated[str, msgspec.Meta(max_length=160, pattern=_PRINTABLE)]
Text = Annotated[str, msgspec.Meta(max_length=512, pattern=_PRINTABLE)]
Outcome = Annotated[str, msgspec.Meta(pattern=r"^[a-z_]{1,32}\Z")]


TOPIC = b"headway-coordination/2"
"""The first frame of every message: name and version of the schema."""

Hop = Annotated[int, msgspec.Meta(ge=-1, le=MOST)]
Session = Annotated[str, msgspec.Meta(pattern=r"^[\w.-]{1,64}\Z")]
Listed = msgspec.Meta(max_length=MOST_REQUESTS)
ByInstance = msgspec.Meta(max_length=MOST_INSTANCES)
Packed = Annotated[bytes, msgspec.Meta(max_length=8 * MOST_REQUESTS)]


class CoordinationError(RuntimeError):
    """A message that cannot be used.

    Args:
        message: what is wrong with it.
        reason: in one word, as `refused_messages` counts it.
    """

    def __init__(self, message: str, reason: Reason = "invalid") -> None:
        super().__init__(message)
        self.reason: Reason = reason


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
        max_tokens: that it may generate, if its client said so.
        movable: whether it can ever move.
        several: whether it asks for several answers, or has several prompts.
        can_move: whether it can move now.
        moving: whether the proxy carries out an order to move it.
        generating: whether its instance has generated a token.
        on_its_way: whether its instance has not accepted it yet.
        avoid: instances that its proxy cannot reach, that have failed it, or turned it away.
    """

    handle: Count
    id: Word
    name: Word
    external_id: Word
    ticket: Count
    for_prefill: bool
    waited: Duration
    instance: Index
    destination: Index
    hop: Hop
    prompt_tokens: Tokens
    generated_tokens: Tokens
    generated_at_move: Tokens | None
    max_tokens: Tokens | None
    movable: bool
    several: bool
    can_move: bool
    moving: bool
    generating: bool
    on_its_way: bool
    avoid: Annotated[list[Index], ByInstance]


class Ended(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request that is over.

    Attributes:
        handle: of its record.
        by_itself: whether its length tells of others': no client or fault cut it.
        generated_tokens: in all.
    """

    handle: Count
    by_itself: bool
    generated_tokens: Tokens


class MoveEnded(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How an order to move a request ended.

    Attributes:
        handle: of its record.
        hop: that the order named.
        outcome: ``moved``, or why it stays.
        pause: seconds from the last token at the source to the first at the target, if it moved.
    """

    handle: Count
    hop: Hop
    outcome: Outcome
    pause: Duration | None = None


class Failure(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A failure that counts against an instance.

    Attributes:
        instance: its index.
        certain: nothing listens there.
    """

    instance: Index
    certain: bool


class Report(msgspec.Struct, array_like=True, frozen=True):
    """What a proxy says.

    Attributes:
        session: random name of the proxy's process, which it tells to nobody else.
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
    incarnation: Word
    heard: Count
    deployment: Word
    listening: Word
    whole: bool = False
    records: Annotated[list[Record], Listed] = []
    ended: Annotated[list[Ended], Listed] = []
    moves: Annotated[list[MoveEnded], Listed] = []
    failures: Annotated[list[Failure], msgspec.Meta(max_length=MOST_FAILURES)] = []
    handles: Packed = b""
    tokens: Packed = b""
    step_seconds: StepSeconds = 0.0
    draining: Annotated[list[Index], ByInstance] = []


class Refusal(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Why a request gets no place.

    Attributes:
        status: for its client, as in HTTP.
        message: for its client.
        retry_after: seconds.
    """

    status: Literal[429, 503]
    message: Text
    retry_after: Annotated[int, msgspec.Meta(ge=0, le=3600)] | None


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
    hop: Hop
    source: Index
    target: Index
    why: Text


class Load(msgspec.Struct, array_like=True, frozen=True):
    """What one proxy has on each instance, in the order of the deployment.

    It does not say whose it is: that is known by the connection through which it comes.

    Attributes:
        requests: [n_instances].
        tokens: [n_instances] of their contexts.
    """

    requests: Annotated[list[Requests], ByInstance]
    tokens: Annotated[list[Count], ByInstance]


class ProxyLoad(msgspec.Struct, array_like=True, frozen=True):
    """A proxy, as the coordinator tells the others of it.

    Attributes:
        proxy: its number; what it calls its session, nobody else is told.
        listening: endpoint at which its peers hear it; empty if there is none.
        load: what it has on each instance.
    """

    proxy: Count
    listening: Word
    load: Load


class View(msgspec.Struct, array_like=True, frozen=True):
    """The cluster, as the coordinator knows it.

    Attributes:
        draining: [n_instances] whether each gets no new requests.
        waiting: requests of all proxies that wait for a place.
        proxies: all that it knows.
    """

    draining: Annotated[list[bool], ByInstance]
    waiting: Count
    proxies: Annotated[list[ProxyLoad], msgspec.Meta(max_length=MOST_SESSIONS)]


class Notice(msgspec.Struct, array_like=True, frozen=True):
    """What the coordinator says.

    Attributes:
        incarnation: of the coordinator's session with this proxy.
        number: of this notice in the session, from 1.
        proxy: number of this proxy in the view; 0: none.
        whole_please: it has missed a report.
        answers: places.
        moves: orders.
        view: a few times a second, once the coordinator decides.
        refused: why it does not work with this proxy; None if it does.
    """

    incarnation: Word
    number: Count
    proxy: Count = 0
    whole_please: bool = False
    answers: Annotated[list[Answer], msgspec.Meta(max_length=MOST_ANSWERS)] = []
    moves: Annotated[list[MoveOrder], msgspec.Meta(max_length=MOST_ORDERS)] = []
    view: View | None = None
    refused: Text | None = None


_encoder = msgspec.msgpack.Encoder()
_reports = msgspec.msgpack.Decoder(Report)
_notices = msgspec.msgpack.Decoder(Notice)
_loads = msgspec.msgpack.Decoder(Load)


def encode(message: Report | Notice | Load) -> list[bytes]:
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


def decode_load(frames: list[bytes]) -> Load:
    """Read what a peer has on the instances.

    Raises:
        CoordinationError: another version of the schema, or no load.
    """
    load: Load = _decoded(frames, _loads)
    return load


def _decoded(frames: list[bytes], decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    if len(frames) != 2:
        raise CoordinationError(f"{len(frames)} frames, not a topic and a message")
    if frames[0] != TOPIC:
        raise CoordinationError(
            f"the other side speaks {frames[0][:40]!r}, this one {TOPIC.decode()}: update one",
            "version",
        )
    try:
        return decoder.decode(frames[1])
    except (msgspec.DecodeError, RecursionError, ValueError) as error:  # ValueError: UTF-8
        raise CoordinationError(f"invalid message: {error}") from error
