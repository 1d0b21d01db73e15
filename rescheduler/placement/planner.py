"""Moving requests between decode instances: by the planner's plans, and away from what drains."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic

from rescheduler.migration import Plan
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.guarded_policy import guarded_view, running_requests
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.placeable import Mover, R
from rescheduler.routing.policy import Needs

logger = logging.getLogger("headway.serve")


class PlannerLoop(Generic[R]):
    """Every interval: view, plan, moves.

    Args:
        planned: is told how many seconds each decision took.
    """

    def __init__(
        self, cluster: Cluster[R], mover: Mover[R], planned: Callable[[float], None]
    ) -> None:
        assert cluster.planner is not None
        self._policy, self._seconds, acts = cluster.planner
        self._shadow = None if acts else cluster.shadow_plans
        self._forecasts = cluster.forecasts if self._policy.needs >= Needs.LENGTHS else None
        self._cluster = cluster
        self._move = mover
        self._planned = planned
        self._said = ""

    async def run(self) -> None:
        """Plan forever."""
        while True:
            await asyncio.sleep(self._seconds)
            self.plan()

    def plan(self) -> None:
        """Plan once, and begin the moves."""
        for instances in _alike([one for one in self._cluster.decodes if one.available]):
            try:
                self._plan(instances)
            except Exception:
                logger.exception("planning by %s failed", self._policy.name)

    def _plan(self, instances: Sequence[InstanceState]) -> None:
        cluster, placements = self._cluster, self._cluster.placements
        if len(instances) < 2 or not running_requests(placements, instances):
            return
        if self._forecasts is not None:
            self._forecasts.refresh()
        started = time.perf_counter()
        now = asyncio.get_running_loop().time()
        instances, view = guarded_view(
            "planning", placements, instances, [], self._forecasts, now, cluster.step.seconds
        )
        if len(instances) < 2:
            return
        running = running_requests(placements, instances)
        plan = self._policy.plan(view)
        self._planned(time.perf_counter() - started)
        if self._shadow is not None:
            self._shadow.count(plan, running, [one.name for one in instances])
            return
        self._log(plan)
        for migration in plan.migrations:
            request, target = running[migration.request], instances[migration.target]
            if target.serves(request.model) and not request.rests(now):
                why = f"{self._policy.name}, gain {migration.gain:.2g}"
                cluster.background(self._move(request, target, why))

    def _log(self, plan: Plan) -> None:
        """Log every plan with moves, and why there are none when that changes."""
        if plan.migrations:
            logger.info("plan: %d moves: %s", len(plan.migrations), plan.reason)
        elif plan.reason != self._said:
            logger.debug("plan: no move: %s", plan.reason)
        self._said = "" if plan.migrations else plan.reason


def _alike(instances: Sequence[InstanceState]) -> list[list[InstanceState]]:
    """Return groups that can read each other's KV cache; what is not known is as the first."""
    first = next((one.kind for one in instances if one.kind is not None), None)
    groups: dict[tuple[object, ...] | None, list[InstanceState]] = {}
    for one in instances:
        groups.setdefault(one.kind or first, []).append(one)
    return list(groups.values())


_DRAIN_SECONDS = 0.25


class Drainer(Generic[R]):
    """Drains instances: nothing new goes there, and what runs there moves away.

    Requests that cannot move, or for which there is no room on an instance that can read their KV
    cache, end where they are.

    Args:
        cluster: the instances.
        mover: moves a request.
        seconds: returns how long what runs on an instance takes to end if nothing moves; None:
            not known.
    """

    def __init__(
        self,
        cluster: Cluster[R],
        mover: Mover[R],
        seconds: Callable[[InstanceState], float | None] = lambda instance: None,
    ) -> None:
        self.cluster = cluster
        self.seconds = seconds
        self._move = mover
        self._moving: set[str] = set()

    def drain(self, instance: InstanceState) -> None:
        """Begin to drain an instance."""
        if not instance.drained:
            requests = len(self.cluster.placements.on(instance))
            logger.info("%s: draining, %d requests", instance.name, requests)
        instance.drained = True

    def undrain(self, instance: InstanceState) -> None:
        """Let requests come to an instance again, unless its engine is being stopped."""
        if instance.drained:
            logger.info("%s: takes requests again", instance.name)
        instance.drained = False
        self.cluster.dispatcher.wake()

    async def run(self) -> None:
        """Move requests away from draining instances, forever."""
        while True:
            await asyncio.sleep(_DRAIN_SECONDS)
            for instance in self.cluster.decodes:
                if instance.draining:
                    try:
                        self._move_away(instance)
                    except Exception:
                        logger.exception("%s: draining failed", instance.name)

    def _move_away(self, instance: InstanceState) -> None:
        now = asyncio.get_running_loop().time()
        requests = [
            request
            for request in self.cluster.placements.on(instance)
            if request.can_move and request.id not in self._moving and not request.rests(now)
        ]
        targets = self.cluster.dispatcher.choose(requests, instance)
        for request, target in zip(requests, targets, strict=True):
            if target is not None:
                self._moving.add(request.id)
                self.cluster.background(self._moved(request, target))

    async def _moved(self, request: R, target: InstanceState) -> None:
        try:
            await self._move(request, target, "drain")
        finally:
            self._moving.discard(request.id)
