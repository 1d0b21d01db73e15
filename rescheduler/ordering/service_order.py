"""Orders of service by name, as configurations give them."""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from data_collection.capture.capture_config import SECTION
from rescheduler.cluster.registry import POSITIVE, Checked, Registry
from rescheduler.ordering.fairness import slack
from rescheduler.ordering.kernel import Kind, OrderParameters


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
        return OrderParameters(int(self.kind), 0.0, starvation=1.0, by_prompt=False, ahead=ahead)


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
class Boost(_Expected, gamma=POSITIVE):
    """In order of arrival, less what a request is boosted by: short ones jump the queue.

    Attributes:
        by, starvation: as of `Shortest`.
        gamma: per second, the decay rate of the latency's tail; estimated when null.
    """

    kind = Kind.BOOST
    gamma: float | None = None

    def parameters(self) -> OrderParameters:
        """Return what the kernel reads."""
        return super().parameters()._replace(gamma=float(self.gamma or 0.0))


class EngineOrderConfig(NamedTuple):
    """The ``order`` part of the ``headway`` section of ``--additional-config``.

    Attributes:
        order: of service.
        prompt_checkpoint: predictor that reads prompts; None: what waits is expected to be like
            what ended lately.
    """

    order: ServiceOrder
    prompt_checkpoint: str | None


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
    if "fairness" in options:
        raise ValueError(
            f"--additional-config, {SECTION}.order.fairness: an engine does not know who sent its "
            "requests; leave it out here, and give it in the order of the proxy"
        )
    try:
        return EngineOrderConfig(create_order(**options), checkpoint)
    except ValueError as error:
        raise ValueError(f"--additional-config, {SECTION}.order: {error}") from error
