"""Orders of service by name, as configurations give them, and the line that one puts in order."""

from abc import ABC
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from data_collection.capture.capture_config import SECTION
from rescheduler.cluster.registry import POSITIVE, Checked, Registry
from rescheduler.ordering.fairness import slack
from rescheduler.ordering.kernel import (
    LATENCIES,
    LATENCIES_A_RATE,
    Kind,
    OrderParameters,
    new_waiting,
    put_in_order,
    tail_rate,
)


@dataclass(frozen=True)
class ServiceOrder(Checked, ABC, fairness="[0, 1]"):
    """Which waiting request goes first; see `rescheduler.ordering.kernel` for the keys.

    Attributes:
        fairness: between accounts, see `rescheduler.ordering.fairness`; 0: they do not count.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    fairness: float = 0.0

    def _section(self) -> str:
        return f"{self.name}: "

    @property
    def needs_lengths(self) -> bool:
        """Whether it goes by forecasts, if only of what a long wait or a fair share is."""
        return self.kind != Kind.FCFS or self.fairness > 0.0

    def parameters(self) -> OrderParameters:
        """Return what the kernel reads."""
        ahead = slack(self.fairness, 1.0)
        return OrderParameters(
            int(self.kind), gamma=0.0, scale=1.0, starvation=1.0, by_prompt=False, ahead=ahead
        )


_ORDERS = Registry[ServiceOrder]("order of service")

service_order = _ORDERS.register
"""Decorator that registers an order under the name that configurations use."""


def create_order(name: str, **options: Any) -> ServiceOrder:
    """Return the order of that name with the given options.

    Raises:
        ValueError: no such order, no such option, or a value that the order refuses.
    """
    return _ORDERS.create(name, options)


@service_order("fcfs")
@dataclass(frozen=True)
class FirstComeFirstServed(ServiceOrder):
    """In order of arrival, which needs no forecast but for its fairness."""

    kind = Kind.FCFS


@dataclass(frozen=True)
class _Expected(ServiceOrder, starvation="(1, inf)"):
    by: Literal["forecast", "prompt"] = "forecast"
    starvation: float = 20.0

    def parameters(self) -> OrderParameters:
        """Return what the kernel reads."""
        prompt, starvation = self.by == "prompt", float(self.starvation)
        return super().parameters()._replace(starvation=starvation, by_prompt=prompt)


@service_order("shortest")
@dataclass(frozen=True)
class Shortest(_Expected):
    """The smallest expected cost first, which has the least mean latency.

    Attributes:
        by: ``forecast`` of the output, or the ``prompt`` alone.
        starvation: times its expected time alone after which a request goes before all others.
    """

    kind = Kind.SHORTEST


@service_order("response_ratio")
@dataclass(frozen=True)
class ResponseRatio(_Expected):
    """The largest ratio of wait and expected time to expected time first.

    Attributes:
        by, starvation: as of `Shortest`.
    """

    kind = Kind.RESPONSE_RATIO


@service_order("boost")
@dataclass(frozen=True)
class Boost(_Expected, gamma=POSITIVE, scale=POSITIVE):
    """In order of arrival, less what a request is boosted by: short ones jump the queue.

    Attributes:
        by, starvation: as of `Shortest`.
        gamma: per second, the decay rate of the latency's tail; estimated when null.
        scale: of the estimate; below 1 the mean latency is shorter, and its tail longer, see
            `headway advise --tail`.
    """

    kind = Kind.BOOST
    gamma: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma is not None and self.scale != 1.0:
            raise ValueError("boost: scale is of the gamma that is estimated; drop one")

    def parameters(self) -> OrderParameters:
        """Return what the kernel reads."""
        rate, scale = float(self.gamma or 0.0), float(self.scale)
        return super().parameters()._replace(gamma=rate, scale=scale)


PAST_KEYS, MOST_PAST_KEYS = 1 << 18, 1 << 24


class EngineOrderConfig(NamedTuple):
    """The ``order`` part of the ``headway`` section of ``--additional-config``.

    Attributes:
        order: of service.
        prompt_checkpoint: predictor that reads prompts; None: the past says what is expected.
        past: prefixes of earlier prompts that are known at most, 32 bytes each; 0: what waits is
            expected to be like what ended lately.
        past_file: that keeps them across restarts; None: a restart forgets them.
    """

    order: ServiceOrder
    prompt_checkpoint: str | None
    past: int = PAST_KEYS
    past_file: str | None = None


def read_engine_order(additional_config: Mapping[str, Any]) -> EngineOrderConfig:
    """Validate what vLLM's additional configuration says of the order.

    Raises:
        ValueError: it says nothing, there is no such order or option, or a value is invalid; or
            it asks for fairness, and an engine does not know who sent a request.
    """
    section = additional_config.get(SECTION)
    given = section.get("order") if isinstance(section, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise ValueError(
            f"--additional-config has no order's name in its {SECTION!r} section; give for example "
            f'\'{{"{SECTION}": {{"order": {{"name": "boost"}}}}}}\''
        )
    options = dict(given)
    checkpoint = options.pop("prompt_checkpoint", None)
    if checkpoint is not None and not isinstance(checkpoint, str):
        raise ValueError(
            f"--additional-config, {SECTION}.order.prompt_checkpoint: a folder, not {checkpoint!r}"
        )
    past = options.pop("past", PAST_KEYS)
    if type(past) is not int or not 0 <= past <= MOST_PAST_KEYS:
        raise ValueError(
            f"--additional-config, {SECTION}.order.past: keys, 0 to {MOST_PAST_KEYS}, not {past!r}"
        )
    past_file = options.pop("past_file", None)
    if past_file is not None and not (
        isinstance(past_file, str) and past_file and not past_file.endswith("/")
    ):
        raise ValueError(
            f"--additional-config, {SECTION}.order.past_file: a file, not {past_file!r}"
        )
    if "fairness" in options:
        raise ValueError(
            f"--additional-config, {SECTION}.order.fairness: an engine does not know who sent its "
            "requests; leave it out here, and give it in the order of the proxy"
        )
    try:
        order = create_order(**options)
    except ValueError as error:
        raise ValueError(f"--additional-config, {SECTION}.order: {error}") from error
    if past_file is not None and (checkpoint is not None or not past or not order.needs_lengths):
        raise ValueError(
            f"--additional-config, {SECTION}.order.past_file: an engine learns nothing of the past "
            f"with {order.name}, past: {past} and prompt_checkpoint: {checkpoint}; leave it out"
        )
    return EngineOrderConfig(order, checkpoint, past, past_file)


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Room(NamedTuple):
    """What requests share.

    Attributes:
        slots: requests that an instance runs at a time.
        capacity: tokens that its KV cache holds.
        step_seconds: that a decode step takes.
    """

    slots: float
    capacity: float
    step_seconds: float


class Line:
    """Puts waiting requests in the order of service, and estimates the rate of a boost."""

    def __init__(self, order: ServiceOrder) -> None:
        self._parameters = order.parameters()
        self._waiting = new_waiting(256)
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._gamma, self._unseen = 0.0, 0
        self._scratch = np.zeros((2, LATENCIES), dtype=np.int64)

    def ended(self, latency: float) -> None:
        """Learn from a request that has ended by itself, after so many seconds."""
        self._latencies.append(latency)
        self._unseen += 1

    def put_in_order(
        self, waited: FloatArray, left: FloatArray, context: FloatArray, latest: float, room: Room
    ) -> tuple[IntArray, bool]:
        r"""Return the order of n requests, and whether the first holds back the others.

        A request costs the larger of its shares of an instance's places and memory, times the
        seconds for which it holds them:

        .. math:: \max\Big(\frac{1}{S}, \frac{c + E[R]/2}{K}\Big) E[R]\,\tau

        Args:
            waited: [n] seconds, in order of arrival.
            left: [n] tokens that each is expected to generate, at least 1.
            context: [n] tokens that it has.
            latest: seconds of waiting after which any of them is overdue.
            room: that they share.
        """
        n = len(waited)
        if self._unseen >= LATENCIES_A_RATE:
            seen = np.array(self._latencies)
            self._gamma, self._unseen = tail_rate(seen, len(seen), *self._scratch), 0
        if n > len(self._waiting.key):
            self._waiting = new_waiting(2 * n)
        waiting = self._waiting
        waiting.waited[:n] = waited
        waiting.alone[:n] = left * room.step_seconds
        if self._parameters.by_prompt:
            waiting.cost[:n] = context
        else:
            slots, capacity = max(room.slots, 1.0), max(room.capacity, 1.0)
            held = np.maximum(1.0 / slots, (context + left / 2) / capacity)
            waiting.cost[:n] = held * waiting.alone[:n]
        waiting.latest[:n] = latest
        alone = put_in_order(self._parameters, self._gamma, waiting, n)
        return waiting.order[:n], alone

    def compile(self) -> None:
        """Order once, so that no request waits for a compiler."""
        put_in_order(self._parameters, 0.0, self._waiting, 2)
        tail_rate(np.zeros(1), 1, *self._scratch)
