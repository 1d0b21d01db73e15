"""When failures take an instance out of service."""

import asyncio
import logging
from collections.abc import Sequence

from rescheduler.placement.instance_state import InstanceState

__all__ = ["Ejections"]

logger = logging.getLogger("headway.serve")


class Ejections:
    """Counts failures against instances.

    Whatever requests see, at least half of the instances of a role stay in service: where all of
    them fail, the cause is seldom the instances. A refused connection takes any instance out.

    Source: the design follows Envoy's outlier detection (``max_ejection_percent``).

    Args:
        instances: all.
    """

    def __init__(self, instances: Sequence[InstanceState]) -> None:
        self._instances = instances

    def count(self, instance: InstanceState, certain: bool) -> None:
        """Count a failure.

        Args:
            instance: that has failed.
            certain: nothing listens there, so that one failure is enough.
        """
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
