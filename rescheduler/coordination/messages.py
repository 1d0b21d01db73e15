"""What a proxy and the coordinator say to each other; never pickle.

A ZMQ message is two frames: `TOPIC`, which names the version of this schema, and a `Report` of a
proxy or a `Notice` of the coordinator as MessagePack.

Both ends number what they send. What is lost, late or doubled is noticed by the numbers, and mended
by a report that is whole: a report says how requests are, not what has happened to them. So a
report that comes twice, or one in place of three that are lost, leads to the same end.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from predictor.past.length_memory import MOST_CHAIN
from rescheduler.placement.placeable import Source

LARGEST_MESSAGE = 8 << 20  # bytes; a connection that sends a larger one is closed
MOST_UNREAD = 64  # of one connection, to be sent or read; what does not fit is lost
MOST_SESSIONS = 64  # proxies of one coordinator
MOST_REQUESTS = 16_384  # of one proxy, four times as many as it can relay tokens for
MOST_INSTANCES = 4_096
MOST_ANSWERS, MOST_ORDERS, MOST_FAILURES = 1_024, 256, 64  # others come in the next message
MOST_LENGTHS = 256  # learned by one message
MOST_UNSAID = 4_096  # of one conversation: of more, the latest
MOST_TOKENS = 2**24  # of a prompt, or of an answer
MOST = 2**40  # no count of requests, tokens or messages comes near it
TOPIC = b"headway-coordination/3"  # the first frame: name and version of the schema
NOWHERE = -1  # in place of an instance's index in the deployment

_PRINTABLE = (  # neither control characters nor those that change the order or are not seen
    r"^[^\x00-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]*\Z"
)

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
Index = Annotated[int, msgspec.Meta(ge=NOWHERE, lt=MOST_INSTANCES)]
Duration = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]  # and no NaN
StepSeconds = Annotated[float, msgspec.Meta(ge=0.0, le=60.0)]
Word = Annotated[str, msgspec.Meta(max_length=160, pattern=_PRINTABLE)]
Text = Annotated[str, msgspec.Meta(max_length=512, pattern=_PRINTABLE)]
Outcome = Annotated[str, msgspec.Meta(pattern=r"^[a-z_]{1,32}\Z")]
Hop = Annotated[int, msgspec.Meta(ge=-1, le=MOST)]
Session = Annotated[str, msgspec.Meta(pattern=r"^[\w.-]{1,64}\Z")]
Listed = msgspec.Meta(max_length=MOST_REQUESTS)
Lengths = msgspec.Meta(max_length=MOST_LENGTHS)
ByInstance = msgspec.Meta(max_length=MOST_INSTANCES)
Digest = Annotated[int, msgspec.Meta(ge=0)]  # MessagePack has none of more than 64 bits
Packed = Annotated[bytes, msgspec.Meta(max_length=8 * MOST_REQUESTS)]

Reason = Literal[
    "version",  # of another schema
    "invalid",  # beyond the bounds, or no message at all
    "content",  # of instances or requests that cannot be
    "number",  # far from the one before it
    "session",  # of a session that belongs to another connection
    "full",  # there are as many sessions as there may be
    "deployment",  # lists other instances
]


class CoordinationError(RuntimeError):
    """A message that cannot be used.

    Args:
        reason: in one word, as `RefusedMessages` counts it.
    """

    def __init__(self, message: str, reason: Reason = "invalid") -> None:
        super().__init__(message)
        self.reason: Reason = reason


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request, as it is; what is not listed is as of `Placeable`.

    Attributes:
        handle: number of the request in its proxy's session.
        ticket: of the place that it has waited for, 0 if for none; ``for_prefill``: to prefill.
        hop: number of its placement on decode instances; each move raises it.
        moving: the proxy carries out an order to move it.
        avoid: instances that its proxy cannot reach, that have failed it, or turned it away.
        account: name of whom it is for.
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
    expected_tokens: Tokens | None = None
    model: Word = ""
    account: Word = ""
    fewest_tokens: Tokens = 0
    prompt_is_known: bool = False
    answers: Annotated[int, msgspec.Meta(ge=1, le=MOST_REQUESTS)] = 1
    media_tokens: Tokens = 0


class Ended(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request that is over; by itself: no client or fault cut it, so its length tells.

    Attributes:
        generated_tokens: of several answers as many as their engine counted.
        counted, length_forecasts: as of `Placeable`.
    """

    handle: Count
    by_itself: bool
    generated_tokens: Tokens
    refused: bool = False
    counted: Annotated[float, msgspec.Meta(ge=0, le=MOST)] | None = None
    length_forecasts: dict[Source, Tokens] = {}


class LearnedLength(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A length that a proxy has learned, as of `LengthMemory`; by digests of what was asked.

    Attributes:
        chain: [n] uint64 as bytes, of the template, of each longer prefix and of the prompt.
        length: of the answer, in tokens.
        cut: it would have been longer without its ``max_tokens``.
    """

    model: Digest
    client: Digest
    chain: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8 * MOST_CHAIN)]
    length: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
    cut: bool


class MoveEnded(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How an order to move a request, which named this hop, ended."""

    handle: Count
    hop: Hop
    outcome: Outcome
    pause: Duration | None = None


class Failure(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A failure that counts against an instance; certain: nothing listens there."""

    instance: Index
    certain: bool


class Report(msgspec.Struct, array_like=True, frozen=True):
    """What a proxy says; reports of a session are numbered from 1.

    Attributes:
        session: random name of the proxy's process, which it tells to nobody else.
        incarnation: of the session with the coordinator, as it heard last.
        heard: number of the last notice from it.
        deployment: digest of the instances' names; it must be the coordinator's.
        whole: whether all of its requests are in here; others are over.
        handles: [n] int64 as bytes, requests whose tokens follow.
        tokens: [n] int64 as bytes, generated so far.
        draining: instances that an operator drains, as the coordinator that it heard last said.
        learned: lengths of requests that have ended here, for the other proxies.
    """

    session: Session
    number: Count
    incarnation: Word
    heard: Count
    deployment: Word
    whole: bool = False
    records: Annotated[list[Record], Listed] = []
    ended: Annotated[list[Ended], Listed] = []
    moves: Annotated[list[MoveEnded], Listed] = []
    failures: Annotated[list[Failure], msgspec.Meta(max_length=MOST_FAILURES)] = []
    handles: Packed = b""
    tokens: Packed = b""
    step_seconds: StepSeconds = 0.0
    draining: Annotated[list[Index], ByInstance] = []
    learned: Annotated[list[LearnedLength], Lengths] = []


class Refusal(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Why a request gets no place, for its client, as in HTTP."""

    status: Literal[429, 503]
    message: Text
    retry_after: Annotated[int, msgspec.Meta(ge=0, le=3600)] | None


class Answer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A place for a request, `NOWHERE` if no prefill instance is in service; or a refusal."""

    ticket: Count
    instance: Index
    refusal: Refusal | None = None


class MoveOrder(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An order to move a request from its placement ``hop``, void if it is elsewhere by now."""

    handle: Count
    hop: Hop
    source: Index
    target: Index
    why: Text


class View(msgspec.Struct, array_like=True, frozen=True):
    """The cluster, as the coordinator knows it.

    Attributes:
        draining: [n_instances] whether an operator drains each.
        waiting: requests of all proxies that wait for a place.
    """

    draining: Annotated[list[bool], ByInstance]
    waiting: Count


class Notice(msgspec.Struct, array_like=True, frozen=True):
    """What the coordinator says; notices of a session are numbered from 1.

    Attributes:
        incarnation: of the coordinator's session with this proxy.
        whole_please: it has missed a report.
        view: a few times a second, once the coordinator decides.
        refused: why it does not work with this proxy; None if it does.
        learned: lengths that other proxies have learned.
    """

    incarnation: Word
    number: Count
    whole_please: bool = False
    answers: Annotated[list[Answer], msgspec.Meta(max_length=MOST_ANSWERS)] = []
    moves: Annotated[list[MoveOrder], msgspec.Meta(max_length=MOST_ORDERS)] = []
    view: View | None = None
    refused: Text | None = None
    learned: Annotated[list[LearnedLength], Lengths] = []


M = TypeVar("M", bound=Report | Notice)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Report, Notice)
}


def encode(message: Report | Notice) -> list[bytes]:
    """Return the frames of a message."""
    return [TOPIC, _encoder.encode(message)]


def decode(frames: list[bytes], kind: type[M]) -> M:
    """Read a message.

    Raises:
        CoordinationError: another version of the schema, or no message of this kind.
    """
    if len(frames) != 2:
        raise CoordinationError(f"{len(frames)} frames, not a topic and a message")
    if frames[0] != TOPIC:
        raise CoordinationError(
            f"the other side speaks {frames[0][:40]!r}, this one {TOPIC.decode()}: update one",
            "version",
        )
    try:
        message: M = _decoders[kind].decode(frames[1])
    except (msgspec.DecodeError, RecursionError, ValueError) as error:  # ValueError: UTF-8
        raise CoordinationError(f"invalid message: {error}") from error
    return message


_QUIET_SECONDS = 10.0


class RefusedMessages(Collector):
    """Counts, from 0 on, for Prometheus.

    Args:
        name: of the metric, without ``_total``.
    """

    def __init__(
        self, name: str, *senders: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._clock = name, clock
        self._said: dict[tuple[str, Reason], float] = {}
        self._counts = {(s, reason): 0 for s in senders for reason in get_args(Reason)}

    def count(self, sender: str, reason: Reason) -> bool:
        """Count what was refused; return whether to log it: every 10 s for the same reason."""
        key, now = (sender, reason), self._clock()
        self._counts[key] += 1
        if now - self._said.get(key, -math.inf) < _QUIET_SECONDS:
            return False
        self._said[key] = now
        return True

    def collect(self) -> Iterator[Metric]:
        """Yield the counts as they are now."""
        refused = CounterMetricFamily(
            self._name, "messages that were refused, by who sent them", labels=["sender", "reason"]
        )
        for labels, count in self._counts.items():
            refused.add_metric(labels, count)
        yield refused
