"""Which failures count against an instance, and when it leaves service for them."""

import asyncio
import logging
from collections.abc import Sequence

from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.proxy.proxy_metrics import ProxyMetrics
from rescheduler.proxy.upstream import UpstreamError

__all__ = ["OutlierDetection"]

logger = logging.getLogger("headway.serve")


class OutlierDetection:
    """Counts what requests see of the instances.

    An error that an instance answers may be the request's own fault. It counts only once another
    instance has served the same request. And whatever requests see, at least half of the
    instances of a role stay in service: a failure of all of them is seldom theirs. Health probes,
    and connections that nobody accepts, take any instance out.

    Source: the design follows Envoy's outlier detection (consecutive gateway failures,
    ``max_ejection_percent``).

    Args:
        instances: all.
        metrics: counts the failures.
    """

    def __init__(self, instances: Sequence[InstanceState], metrics: ProxyMetrics) -> None:
        self._instances, self._metrics = instances, metrics

    def failed(self, request: LiveRequest, instance: InstanceState, error: UpstreamError) -> None:
        """Note that an instance failed a request."""
        self._metrics.failures.labels(instance.name).inc()
        logger.warning("request %s: %s", request.id, error)
        if error.answered:
            request.failed_by.append(instance)
        else:
            self._count(instance, error.unsent)

    def succeeded(self, request: LiveRequest, instance: InstanceState) -> None:
        """Note that an instance serves a request; those that answered it with an error failed."""
        instance.breaker.succeeded()
        for other in request.failed_by:
            if other is not instance:
                self._count(other)
        request.failed_by.clear()

    def _count(self, instance: InstanceState, certain: bool = False) -> None:
        if not (certain or self._may_leave(instance)):
            return
        now = asyncio.get_running_loop().time()
        if instance.breaker.failed(now, certain):
            logger.warning("%s: out of service", instance.name)

    def _may_leave(self, instance: InstanceState) -> bool:
        """Return whether half of the instances of its role would stay in service without it."""
        peers = [one for one in self._instances if one.instance.role == instance.instance.role]
        out = sum(not one.breaker.closed for one in peers if one is not instance)
        return 2 * (out + 1) <= len(peers)
