"""How many messages of others were refused, and why."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Literal, get_args

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["Reason", "RefusedMessages"]

Reason = Literal[
    "version",  # of another schema
    "invalid",  # beyond the bounds of `limits`, or no message at all
    "content",  # of instances or requests that cannot be
    "number",  # far from the one before it
    "session",  # of a session that belongs to another connection
    "full",  # there are as many sessions as there may be
    "deployment",  # lists other instances
    "endpoint",  # names one that its peers must not connect to
]


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
