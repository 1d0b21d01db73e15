"""A routing policy whose failures delay nobody."""

import logging
import time
from collections.abc import Callable

from rescheduler.cluster.cluster_view import ClusterView
from rescheduler.routing.heuristics.jsq_load import JSQLoad
from rescheduler.routing.policy import RoutingPolicy

__all__ = ["GuardedPolicy"]

logger = logging.getLogger("headway.serve")

_SLOW_SECONDS = 0.25
_REST_SECONDS = 30.0


class GuardedPolicy:
    """Decides by a policy, or by the least KV load where the policy raises or is slow.

    The event loop, and with it every stream, waits for a decision. So after one that computed
    for more than 0.25 s the policy rests for 30 s, as it does after it raised.

    Args:
        policy: that decides.
        clock: seconds.
        computed: seconds that this thread has computed.

    Attributes:
        policy: as given.
        decided_by: name of the policy that decided last.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        clock: Callable[[], float],
        computed: Callable[[], float] = time.thread_time,
    ) -> None:
        self.policy = policy
        self.decided_by = policy.name
        self._clock, self._computed = clock, computed
        self._fallback = JSQLoad()
        self._rests_until = float("-inf")

    def assign(self, view: ClusterView) -> list[int]:
        """Return the instance of each waiting request, -1 for one that goes on waiting."""
        if self._clock() < self._rests_until:
            return self._by_load(view)
        started = self._computed()
        try:
            targets: list[int] = self.policy.assign(view).instance.tolist()
        except Exception:
            logger.exception("routing by %s failed; by least load instead", self.policy.name)
            self._rests_until = self._clock() + _REST_SECONDS
            return self._by_load(view)
        self.decided_by = self.policy.name
        took = self._computed() - started
        if took > _SLOW_SECONDS:
            logger.error("routing by %s took %.2f s; by least load instead", self.policy.name, took)
            self._rests_until = self._clock() + _REST_SECONDS
        return targets

    def _by_load(self, view: ClusterView) -> list[int]:
        self.decided_by = self._fallback.name
        targets: list[int] = self._fallback.assign(view).instance.tolist()
        return targets
