"""What the proxy knows of one instance."""

import logging
from collections import Counter

from rescheduler.cluster.cluster_view import UNLIMITED
from rescheduler.engines.deployment import Instance, ProxyOptions
from rescheduler.placement.circuit_breaker import CircuitBreaker
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import EngineState

__all__ = ["InstanceState"]

logger = logging.getLogger("headway.serve")


class InstanceState:
    """An instance in service, or not.

    Args:
        instance: of the deployment.
        options: of the proxy.
        control: client of its control socket; None if it has none.

    Attributes:
        breaker: whether it works.
        draining: it gets no new requests.
        engine: as its control socket last reported it; None before, and without one.
        left_out: how many decisions were taken without it, since what is known of it could not be
            used, by what they were for.
    """

    def __init__(
        self, instance: Instance, options: ProxyOptions, control: ControlClient | None
    ) -> None:
        self.instance, self.control = instance, control
        self.breaker = CircuitBreaker(options.breaker_failures, options.breaker_seconds)
        self.draining = False
        self.engine: EngineState | None = None
        self.left_out: Counter[str] = Counter()

    @property
    def name(self) -> str:
        """Its name."""
        return self.instance.name

    @property
    def available(self) -> bool:
        """Whether new requests may go there."""
        return self.breaker.closed and not self.draining

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

    def leave_out(self, purpose: str, error: Exception) -> None:
        """Note that a decision is taken without it; logged the first time."""
        if not self.left_out:
            logger.error(
                "%s: left out of decisions, since what it says of itself cannot be used: %r",
                self.name,
                error,
            )
        self.left_out[purpose] += 1
