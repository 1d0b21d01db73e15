"""What the proxy knows of one instance."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec

from rescheduler.cluster.cluster_view import UNLIMITED
from rescheduler.engines.deployment import Instance
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.openai.openai_request import LONGEST_MODEL, RequestRefusedError
from rescheduler.placement.evidence import EngineEvidence, EngineHealth
from rescheduler.placement.upstream import EngineRefusedError, Upstream, UpstreamError
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import EngineState

_LONGEST = 16  # times the first wait


class BreakerState(Enum):
    """Whether an instance is in service, out of it and left alone, or being probed."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Takes an instance out of service after failures in a row, and back after a probe.

    Requests go to an instance whose breaker is closed. Some failures in a row open it, or a
    single one that leaves no doubt. After a while one probe is due (half open): if it succeeds
    the breaker closes, if not it opens for twice as long, up to 16 times the first wait.

    Nothing here has a clock: the caller says what time it is, in seconds.

    Args:
        failures: in a row that open it.
        seconds: until the first probe.
    """

    def __init__(self, failures: int, seconds: float) -> None:
        self.state = BreakerState.CLOSED
        self._limit, self._seconds = failures, seconds
        self._failures = 0
        self._wait = seconds
        self._opened = 0.0

    @property
    def closed(self) -> bool:
        """Whether requests may go there."""
        return self.state is BreakerState.CLOSED

    def succeeded(self) -> None:
        """Note an answer."""
        self.state = BreakerState.CLOSED
        self._failures, self._wait = 0, self._seconds

    def failed(self, now: float, certain: bool = False) -> bool:
        """Note a failure; return whether it took the instance out of service.

        One is enough if it is ``certain``: nothing listens there.
        """
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._wait = min(2 * self._wait, _LONGEST * self._seconds)
        elif self.state is BreakerState.OPEN or not (certain or self._failures >= self._limit):
            return False
        was_closed = self.closed
        self.state, self._opened = BreakerState.OPEN, now
        return was_closed

    def probe_due(self, now: float) -> bool:
        """Return whether to probe now; from then on it is half open."""
        if self.state is BreakerState.OPEN and now - self._opened >= self._wait:
            self.state = BreakerState.HALF_OPEN
            return True
        return False

    def seconds_to_probe(self, now: float) -> float:
        """Return how long until the next probe, 0 if it is due or the instance is in service."""
        if self.state is not BreakerState.OPEN:
            return 0.0
        return max(0.0, self._opened + self._wait - now)


logger = logging.getLogger("headway.serve")


class InstanceState:
    """An instance in service, or not.

    Attributes:
        evidence: of whether it lives.
        drained: an operator wants it empty.
        engine: as its control socket last reported it; None before, and without one.
        models: that it serves, adapters among them, as it last listed them; None: not known.
        others: requests of other clients there, as its ``/metrics`` last told; none with a control
            socket.
        left_out: how many decisions were taken without it, since what is known of it could not be
            used, by what they were for.
    """

    def __init__(
        self, instance: Instance, options: ProxyOptions, control: ControlClient | None
    ) -> None:
        self.instance, self.control = instance, control
        self.breaker = CircuitBreaker(options.breaker_failures, options.breaker_seconds)
        self.evidence = EngineEvidence(
            options.silent_seconds,
            options.probe_seconds,
            options.probe_seconds + options.control_seconds,
            time.monotonic(),
        )
        self.drained = False
        self.engine: EngineState | None = None
        self.models: frozenset[str] | None = None
        self.others: Sequence[Any] = []
        self.left_out: Counter[str] = Counter()

    @property
    def name(self) -> str:
        """That of the instance."""
        return self.instance.name

    @property
    def draining(self) -> bool:
        """Whether it is to be emptied: an operator wants that, or the engine is being stopped."""
        return self.drained or (self.engine is not None and self.engine.draining)

    @property
    def available(self) -> bool:
        """Whether new requests may go there."""
        return self.breaker.closed and not self.draining

    def serves(self, model: str) -> bool:
        """Return whether it has a model, as far as is known; no name: any."""
        return not model or self.models is None or model in self.models

    def lacks(self, model: str) -> None:
        """Note that it does not have a model that it listed."""
        if self.models is not None:
            self.models -= {model}

    @property
    def silent(self) -> bool:
        """Whether nothing has been heard of it for a while: others are better."""
        return self.evidence.health(time.monotonic()) is EngineHealth.SILENT

    @property
    def without(self) -> list[str]:
        """Endpoints of Headway that its engine does not have, in the words of a deployment."""
        fields = ("control", "telemetry")
        return [field for field in fields if getattr(self.instance, field) is None]

    @property
    def slots(self) -> int:
        """Requests that it runs at a time."""
        return self.engine.max_num_seqs if self.engine else int(UNLIMITED)

    @property
    def kv_capacity(self) -> int:
        """Tokens that its KV cache holds."""
        if self.engine is None:
            return int(UNLIMITED)
        return self.engine.num_blocks * self.engine.block_size

    @property
    def parses_again(self) -> bool:
        """Whether it can go on with an answer whose text another engine has begun to parse."""
        return self.engine is not None and self.engine.parses_again

    @property
    def kind(self) -> tuple[object, ...] | None:
        """What another engine must have in common to read its KV cache; None: not known yet."""
        return self.engine.kind if self.engine is not None else None

    def is_unlike(self, other: "InstanceState", moves: bool = True) -> bool:
        """Return whether another instance cannot read this one's KV cache, as far as is known.

        Without ``moves`` it is to read prefilled requests only, not running ones.
        """
        mine, theirs, end = self.kind, other.kind, None if moves else -1
        return mine is not None and theirs is not None and mine[:end] != theirs[:end]

    def leave_out(self, purpose: str, error: Exception) -> None:
        """Note that a decision is taken without it; logged the first time."""
        if not self.left_out:
            logger.error(
                "%s: left out of decisions, since what it says of itself cannot be used: %r",
                self.name,
                error,
            )
        self.left_out[purpose] += 1


MODELS = "/v1/models"
_MOST_MODELS = 4096
_LARGEST_LIST = 4 << 20


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def ask_models(upstream: Upstream, instance: InstanceState) -> None:
    """Ask an instance for its models; what it listed before holds while it does not answer.

    An engine may load an adapter at any time, and no other engine has it then.
    """
    try:
        instance.models = _names(await upstream.get(instance.instance, MODELS))
    except EngineRefusedError:  # for want of a key, perhaps
        instance.models = None
    except (UpstreamError, RequestRefusedError):
        pass  # its health says whether it is in service


def _names(body: bytes) -> frozenset[str] | None:
    """Return the names of a list of models; None if it is none that can be used.

    A request for a name that is too long is for no model in particular.
    """
    if len(body) > _LARGEST_LIST:
        return None
    try:
        listed = msgspec.json.decode(body, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    names = frozenset(model.id for model in listed if len(model.id) <= LONGEST_MODEL)
    return names if 0 < len(names) <= _MOST_MODELS else None


def differing_models(instances: Sequence[InstanceState]) -> list[InstanceState]:
    """Return as few instances as have among them all models that are known; none if all do."""
    seen: set[str] = set()
    chosen = []
    for instance in instances:
        if instance.models is not None and not instance.models <= seen:
            seen |= instance.models
            chosen.append(instance)
    return chosen if len(chosen) > 1 else []


def merged_models(bodies: Sequence[bytes]) -> bytes:
    """Return the lists of several instances as one: each model as it is listed first.

    The first list is returned as it is where the others add nothing, or are no lists.
    """
    merged: dict[str, Any] | None = None
    seen: set[str] = set()
    more = False
    for body in bodies:
        try:
            read = msgspec.json.decode(body, type=dict[str, Any])
            models = msgspec.convert(read.get("data"), list[dict[str, Any]])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        new = [model for model in models if str(model.get("id")) not in seen]
        seen |= {str(model.get("id")) for model in new}
        if merged is None:
            merged = {**read, "data": new}
        elif new:
            merged["data"] += new
            more = True
    return msgspec.json.encode(merged) if merged is not None and more else bodies[0]
