"""Which failures count against an instance."""

import logging
from collections.abc import Callable

from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.proxy.proxy_metrics import ProxyMetrics
from rescheduler.proxy.upstream import UpstreamError

__all__ = ["OutlierDetection"]

logger = logging.getLogger("headway.serve")


class OutlierDetection:
    """Notes what requests see of the instances.

    An error that an instance answers may be the request's own fault. It counts only once another
    instance has served the same request.

    Source: the design follows Envoy's outlier detection (consecutive gateway failures).

    Args:
        count: counts a failure against an instance; the flag: nothing listens there.
        metrics: counts the failed calls.
    """

    def __init__(self, count: Callable[[InstanceState, bool], None], metrics: ProxyMetrics) -> None:
        self._count, self._metrics = count, metrics

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
                self._count(other, False)
        request.failed_by.clear()
