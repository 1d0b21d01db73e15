"""The loop that runs the migration planner and carries out its plans."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic

from rescheduler.migration import MigrationPolicy, Plan
from rescheduler.placement.cluster_state import running_requests
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.guarded_view import guarded_view
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Mover, PlacedRequests, R
from rescheduler.routing.policy import Needs

__all__ = ["PlannerLoop"]

logger = logging.getLogger("headway.serve")


class PlannerLoop(Generic[R]):
    """Every interval: view, plan, moves.

    Args:
        policy: the planner.
        seconds: between two plans.
        placements: which requests are on which instance.
        decodes: the decode instances.
        forecasts: of remaining lengths; None if no engine publishes them.
        dispatcher: knows how long a decode step takes.
        mover: carries moves out.
        planned: is told how many seconds each decision took.
        background: runs the moves.
    """

    def __init__(
        self,
        policy: MigrationPolicy,
        seconds: float,
        placements: PlacedRequests[R],
        decodes: Sequence[InstanceState],
        forecasts: LiveForecasts | None,
        dispatcher: Dispatcher[R],
        mover: Mover[R],
        planned: Callable[[float], None],
        background: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._policy, self._seconds = policy, seconds
        self._placements, self._decodes, self._dispatcher = placements, decodes, dispatcher
        self._forecasts = forecasts if policy.needs >= Needs.LENGTHS else None
        self._mover, self._planned, self._background = mover, planned, background
        self._said = ""

    async def run(self) -> None:
        """Plan forever."""
        while True:
            await asyncio.sleep(self._seconds)
            try:
                self.plan()
            except Exception:
                logger.exception("planning by %s failed", self._policy.name)

    def plan(self) -> None:
        """Plan once, and begin the moves."""
        instances = [instance for instance in self._decodes if instance.available]
        if len(instances) < 2 or not running_requests(self._placements, instances):
            return
        if self._forecasts is not None:
            self._forecasts.refresh()
        started = time.perf_counter()
        now = asyncio.get_running_loop().time()
        step_seconds = self._dispatcher.step_seconds
        instances, view = guarded_view(
            "planning", self._placements, instances, [], self._forecasts, now, step_seconds
        )
        if len(instances) < 2:
            return
        running = running_requests(self._placements, instances)
        plan = self._policy.plan(view)
        self._planned(time.perf_counter() - started)
        self._log(plan)
        for migration in plan.migrations:
            request, target = running[migration.request], instances[migration.target]
            if not request.rests(now):
                self._background(self._move(request, target, migration.gain))

    async def _move(self, request: R, target: InstanceState, gain: float) -> None:
        await self._mover.move(request, target, f"{self._policy.name}, gain {gain:.2g}")

    def _log(self, plan: Plan) -> None:
        """Log every plan with moves, and why there are none when that changes."""
        if plan.migrations:
            logger.info("plan: %d moves: %s", len(plan.migrations), plan.reason)
        elif plan.reason != self._said:
            logger.debug("plan: no move: %s", plan.reason)
        self._said = "" if plan.migrations else plan.reason
