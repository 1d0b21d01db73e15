"""Policies that decide and do not act, and what they would have done."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic

import numpy as np
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from rescheduler.cluster.cluster_view import ClusterView
from rescheduler.migration import Plan
from rescheduler.placement.guarded_policy import GuardedPolicy
from rescheduler.placement.placeable import Placeable, R
from rescheduler.placement.waiting_line import WaitingLine
from rescheduler.routing.policy import RoutingPolicy

logger = logging.getLogger("headway.serve")

_EVERY_SECONDS = 0.1
_LARGEST_SHARE = 0.05
"""Of the processor, for the comparison of two orders."""


class ShadowPolicy:
    """Decides whatever the routing policy decides, and does not act.

    It sees the cluster as the routing policy has made it, one decision at a time. What it would
    have made of the cluster itself, only a simulation says.

    Attributes:
        decisions: of requests, by whether it would have chosen the ``same`` instance or an
            ``other`` one, would have let only one of both ``wait``, or did not decide (``none``).
        lighter: tokens that its instance was expected to hold less than the chosen one, summed over
            the decisions for another instance.
        heavier: tokens that it was expected to hold more, likewise.
    """

    def __init__(self, policy: RoutingPolicy, clock: Callable[[], float]) -> None:
        self.policy = policy
        self.decisions = dict.fromkeys(("same", "other", "wait", "none"), 0)
        self.lighter = 0.0
        self.heavier = 0.0
        self._decides = GuardedPolicy(policy, clock)

    def compare(self, view: ClusterView, chosen: Sequence[int]) -> None:
        r"""Decide on a view of which the routing policy has chosen these instances, -1 to wait.

        An instance g is expected to hold :math:`\sum_i c_i + E[R_i]` tokens: the contexts of its
        requests and, where there are forecasts, the tokens that are left to them. Whatever goes
        wrong here is counted, and changes nothing.
        """
        try:
            self._compare(view, chosen)
        except Exception:
            self.decisions["none"] += len(chosen)
            logger.debug("the shadow %s did not decide", self.policy.name, exc_info=True)

    def _compare(self, view: ClusterView, chosen: Sequence[int]) -> None:
        would = self._decides.assign(view)
        if self._decides.decided_by != self.policy.name:
            self.decisions["none"] += len(would)
            return
        if would == list(chosen):
            self.decisions["same"] += len(would)
            return
        ahead = view.forecast.mean() if view.forecast is not None else 0.0
        load = np.bincount(view.instance, view.context_tokens + ahead, view.n_instances)
        for mine, actual in zip(would, chosen, strict=True):
            if mine == actual:
                self.decisions["same"] += 1
            elif -1 in (mine, actual):
                self.decisions["wait"] += 1
            else:
                self.decisions["other"] += 1
                difference = float(load[actual] - load[mine])
                self.lighter += max(0.0, difference)
                self.heavier += max(0.0, -difference)

    def metrics(self, prefix: str) -> Iterator[Metric]:
        """Yield what it has counted."""
        name = self.policy.name
        yield _counter(
            f"{prefix}_shadow_decisions",
            "decisions on requests by whether the shadow would have chosen the `same` instance or "
            "an `other` one, would have let only one of both `wait`, or did not decide (`none`)",
            ("policy", "outcome"),
            {(name, outcome): number for outcome, number in self.decisions.items()},
        )
        yield _counter(
            f"{prefix}_shadow_load_difference_tokens",
            "tokens that the other instance of the shadow was expected to hold less, `lighter`, or "
            "more, `heavier`, than the chosen one",
            ("policy", "outcome"),
            {(name, "lighter"): self.lighter, (name, "heavier"): self.heavier},
        )


def _counter(
    name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]
) -> Metric:
    counter = CounterMetricFamily(name, text, labels=labels)
    for label, value in values.items():
        counter.add_metric(label, value)
    return counter


class ShadowOrder(Generic[R]):
    r"""Puts those that wait in another order than theirs, ten times a second, and does not act.

    Of a line of n requests that are expected to generate :math:`\ell_1, \dots, \ell_n` tokens, in
    an order's sequence, a request has on average

    .. math:: A = \frac{1}{n} \sum_{i=1}^{n} \sum_{j < i} \ell_j

    tokens before it. The mean wait goes by that.

    Args:
        line: that is only asked, never served.
        name: of its order.

    Attributes:
        rounds: by whether the same request (``same``) or an ``other`` one goes first by both, or
            the shadow failed (``none``).
        ahead: sum over the rounds of A, in the ``actual`` order and in the ``shadow``'s.
    """

    def __init__(
        self,
        line: WaitingLine[R],
        name: str,
        clock: Callable[[], float],
        computed: Callable[[], float] = time.thread_time,
    ) -> None:
        self.line, self.name = line, name
        self.rounds = dict.fromkeys(("same", "other", "none"), 0)
        self.ahead = dict.fromkeys(("actual", "shadow"), 0.0)
        self._clock, self._computed = clock, computed
        self._next = float("-inf")

    def compare(self, waiting: Sequence[R], actual: Sequence[R]) -> None:
        """Put requests, given as they came, in order, and compare that with the actual order."""
        if len(waiting) < 2 or self._clock() < self._next:
            return
        began = self._computed()
        try:
            ordered, _ = self.line.in_order(waiting)
            left = self.line.expected_left(waiting)
        except Exception:
            self.rounds["none"] += 1
            logger.debug("the shadow %s gave no order", self.name, exc_info=True)
        else:
            tokens: dict[Placeable, float] = dict(zip(waiting, left.tolist(), strict=True))
            self.rounds["same" if ordered[0] is actual[0] else "other"] += 1
            self.ahead["actual"] += _mean_ahead(actual, tokens)
            self.ahead["shadow"] += _mean_ahead(ordered, tokens)
        took = self._computed() - began
        self._next = self._clock() + max(_EVERY_SECONDS, took / _LARGEST_SHARE)

    def metrics(self, prefix: str) -> Iterator[Metric]:
        """Yield what it has counted."""
        yield _counter(
            f"{prefix}_shadow_order_rounds",
            "looks at a line by whether the same request (`same`) or an `other` one goes first in "
            "the order of the shadow, or that failed (`none`)",
            ("order", "outcome"),
            {(self.name, outcome): number for outcome, number in self.rounds.items()},
        )
        yield _counter(
            f"{prefix}_shadow_order_tokens_ahead",
            "tokens that are expected before a waiting request, on average over the line, summed "
            "over these looks: in the `actual` order, and in that of the `shadow`",
            ("order", "by"),
            {(self.name, by): tokens for by, tokens in self.ahead.items()},
        )


def _mean_ahead(ordered: Sequence[Placeable], tokens: Mapping[Placeable, float]) -> float:
    left = np.fromiter((tokens[request] for request in ordered), np.float64, len(ordered))
    return float(np.mean(np.cumsum(left) - left))


class ShadowPlans:
    """Counts the moves of a planner that does not act: each request's first one to an instance.

    As nothing moves, the planner proposes the same again and again.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.moves = self.tokens = 0
        self._counted: dict[Placeable, set[str]] = {}

    def count(self, plan: Plan, running: Sequence[Placeable], targets: Sequence[str]) -> None:
        """Count a plan for requests, in the order of the view, and instances."""
        self._counted = {one: self._counted[one] for one in running if one in self._counted}
        for migration in plan.migrations:
            request, target = running[migration.request], targets[migration.target]
            known = self._counted.setdefault(request, set())
            if target not in known:
                known.add(target)
                self.moves += 1
                self.tokens += request.context_tokens

    def metrics(self, prefix: str) -> Iterator[Metric]:
        """Yield what it has counted."""
        for what, text, value in (
            ("moves", "moves that the shadow would have begun", self.moves),
            ("moved_tokens", "tokens in the caches that those would have copied", self.tokens),
        ):
            yield _counter(f"{prefix}_shadow_{what}", text, ["planner"], {(self.name,): value})
