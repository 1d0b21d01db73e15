"""What the page shows of a cluster at one moment, and what a log has a line of."""

from enum import IntEnum
from typing import Literal

import msgspec

__all__ = [
    "UNKNOWN",
    "About",
    "Accuracy",
    "Finishes",
    "Instance",
    "MoveReport",
    "Outlook",
    "Phase",
    "Requests",
    "Snapshot",
]

UNKNOWN = -1
"""In a column of numbers: not known, or on no instance."""


class Phase(IntEnum):
    """How far a request is."""

    WAITING = 0
    """On no decode instance yet."""
    PREFILLING = 1
    """On a prefill instance."""
    PLACED = 2
    """On a decode instance, which has not generated a token of it since it came."""
    DECODING = 3
    """Generating tokens."""
    MOVING = 4
    """On its way from one decode instance to another; it generates tokens until it is frozen."""


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a row of snapshots is of: sent before them, and the first line of a log.

    Attributes:
        format: always the same, by which a log is told from other files.
        version: of this format.
        source: whether the cluster is a proxy's or a simulated one.
        title: of the picture, as the name of the model, or of the simulated policy.
        routing: name of the routing policy.
        migration: name of the migration planner; empty without one.
        seconds: between two snapshots.
    """

    format: Literal["headway-log"] = "headway-log"
    version: Literal[1] = 1
    source: Literal["proxy", "simulation"]
    title: str
    routing: str
    migration: str
    seconds: float


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    Attributes:
        name: of the deployment.
        role: what it does; replicas, which do both, are decode instances.
        in_service: whether it works.
        draining: whether it gets no new requests.
        slots: requests that it runs at a time; `UNKNOWN` if nobody says.
        kv_capacity: tokens that its KV cache holds; `UNKNOWN` if nobody says.
        kv_tokens: context tokens of the requests on it, or on their way to it.
        ahead: [P] tokens that they are expected to hold at `Snapshot.points`; empty without
            forecasts.
        deviation: [P] standard deviation of that.
        overflow: [P] probability that they then hold more than its capacity; empty without
            forecasts, or if the capacity is unknown.
        step_seconds: mean duration of its engine's steps lately; None if nobody measures it, or
            it does nothing.
    """

    name: str
    role: Literal["prefill", "decode"]
    in_service: bool
    draining: bool
    slots: int
    kv_capacity: int
    kv_tokens: int
    ahead: list[int] = []
    deviation: list[int] = []
    overflow: list[float] = []
    step_seconds: float | None = None


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """The requests, as columns of one length: there may be thousands.

    Attributes:
        number: tells requests apart for as long as they run.
        name: as its client called it, cut to 40 characters.
        phase: a `Phase`.
        instance: index of the instance that it is on; `UNKNOWN` while it waits.
        target: index of the instance that it is moving to; `UNKNOWN` if it is not.
        prompt: tokens.
        generated: tokens so far.
        low: remaining tokens that it exceeds with probability 0.9; `UNKNOWN` without a forecast,
            as are the other two.
        median: of the remaining tokens.
        high: remaining tokens that it exceeds with probability 0.1.
    """

    number: list[int] = []
    name: list[str] = []
    phase: list[int] = []
    instance: list[int] = []
    target: list[int] = []
    prompt: list[int] = []
    generated: list[int] = []
    low: list[int] = []
    median: list[int] = []
    high: list[int] = []

    def __post_init__(self) -> None:
        """Refuse columns of different lengths.

        Raises:
            ValueError: as msgspec reports it.
        """
        if len({len(getattr(self, name)) for name in self.__struct_fields__}) > 1:
            raise ValueError("the columns of requests have different lengths")


class MoveReport(msgspec.Struct, frozen=True, kw_only=True):
    """A move that has ended, well or not.

    Attributes:
        time: when, on the clock of `Snapshot.time`.
        number: of the request; `UNKNOWN` if it has ended.
        name: of the request.
        source: name of the instance that it left.
        target: name of the instance that it was to go to.
        tokens: that it had generated.
        reason: of the move.
        outcome: ``moved``, or why it was not; `docs/serve.md` lists them.
        pause: seconds from the last token at the source to the first at the target; None if it
            did not move, or nobody measures it.
    """

    time: float
    number: int
    name: str
    source: str
    target: str
    tokens: int
    reason: str
    outcome: str
    pause: float | None = None


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """How good the forecasts of the requests were that ended within the last hour.

    Every forecast of a request counts, against the tokens that came after it.

    Attributes:
        requests: how many.
        coverage: [3] share of the ends inside the central 50, 80 and 90% interval.
        error: tokens that the median was off by, on average.
        bias: mean of the median less what came, in tokens: above 0 it was too long.
        late: share of the ends after the median; a half when it is not biased.
        alarm: what is wrong with the intervals; empty if nothing is, None if too few requests
            have ended to say.
        drift: in which way the forecasts have become worse within the hour; empty and None
            likewise.
    """

    requests: int
    coverage: list[float]
    error: float
    bias: float
    late: float
    alarm: str | None = None
    drift: str | None = None


class Finishes(msgspec.Struct, frozen=True, kw_only=True):
    """How forecasts and promises of when requests finish came out.

    Attributes:
        forecasts: the latest forecasts of a finish that have come out, at most 500.
        held: share of their 80% intervals that held; None without any.
        kept: promises that were kept since the proxy started.
        broken: that were not.
        refused: that were asked for and not given.
    """

    forecasts: int
    held: float | None
    kept: int
    broken: int
    refused: int


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """The load ahead of all decode instances, if requests go on coming as in the last minute.

    Attributes:
        seconds: how far ahead ``tokens`` is, and how long ago ``foretold`` was.
        tokens: [3] context tokens expected then: the 10, 50 and 90% quantile.
        foretold: [3] likewise, what had been expected of now; empty if nobody looked then.
        wanted: decode instances that hold the load of 300 seconds ahead nine times in ten; None if
            what an instance holds is not known.
    """

    seconds: float
    tokens: list[int]
    foretold: list[int] = []
    wanted: int | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster at one moment.

    Attributes:
        time: seconds since 1970, or since the start of a simulation.
        step_seconds: mean duration of a decode step lately; None if nobody measures it.
        points: [P] decode steps ahead at which loads are expected; empty without forecasts.
        instances: all.
        requests: all that an instance has, and those that wait for a decode instance.
        further_waiting: requests that wait and are not among these, since they wait for a prefill
            instance, or are too many.
        moves: the latest that have ended, oldest first.
        accuracy: of the forecasts; None before a request with a forecast has ended, and where
            nobody scores them.
        joules: energy that all instances have used since the start; None if nobody measures it.
        finishes: how forecasts of finish times came out; None before any has, and where none are
            made.
        outlook: the load ahead; None likewise.
    """

    time: float
    step_seconds: float | None
    points: list[int]
    instances: list[Instance]
    requests: Requests
    further_waiting: int = 0
    moves: list[MoveReport] = []
    accuracy: Accuracy | None = None
    joules: float | None = None
    finishes: Finishes | None = None
    outlook: Outlook | None = None
