"""The loop that runs the migration planner and carries out its plans."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Generic

from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.migration import MigrationPolicy, Plan, create_migration_policy
from rescheduler.placement.cluster_state import running_requests
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.guarded_policy import (
    PrefillBudgets,
    crowded_view,
    deployed_policy,
    guarded_view,
)
from rescheduler.placement.instance_state import Ejections, InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Mover, PlacedRequests, Placements, R
from rescheduler.routing.policy import Needs
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.telemetry.telemetry_view import TelemetryView

__all__ = ["Drainer", "PlannerLoop", "Planning"]


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


_SECONDS = 0.25


class Drainer(Generic[R]):
    """Drains instances: nothing new goes there, and what runs there moves away.

    Requests that cannot move, or for which there is no room elsewhere, end where they are.

    Args:
        placements: which requests are on which instance.
        decodes: the decode instances.
        dispatcher: chooses where requests go.
        mover: moves them.
        background: runs the moves.
    """

    def __init__(
        self,
        placements: PlacedRequests[R],
        decodes: Sequence[InstanceState],
        dispatcher: Dispatcher[R],
        mover: Mover[R],
        background: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._placements, self._decodes, self._dispatcher = placements, decodes, dispatcher
        self._mover, self._background = mover, background
        self._moving: set[str] = set()

    def drain(self, instance: InstanceState) -> None:
        """Begin to drain an instance."""
        if not instance.draining:
            requests = len(self._placements.on(instance))
            logger.info("%s: draining, %d requests", instance.name, requests)
        instance.draining = True

    def undrain(self, instance: InstanceState) -> None:
        """Let requests come to an instance again."""
        if instance.draining:
            logger.info("%s: takes requests again", instance.name)
        instance.draining = False
        self._dispatcher.wake()

    async def run(self) -> None:
        """Move requests away from draining instances, forever."""
        while True:
            await asyncio.sleep(_SECONDS)
            for instance in self._decodes:
                if instance.draining:
                    try:
                        self._move_away(instance)
                    except Exception:
                        logger.exception("%s: draining failed", instance.name)

    def _move_away(self, instance: InstanceState) -> None:
        now = asyncio.get_running_loop().time()
        requests = [
            request
            for request in self._placements.on(instance)
            if request.can_move and request.id not in self._moving and not request.rests(now)
        ]
        for request, target in zip(requests, self._dispatcher.choose(requests), strict=True):
            if target is not None:
                self._moving.add(request.id)
                self._background(self._move(request, target))

    async def _move(self, request: R, target: InstanceState) -> None:
        try:
            await self._mover.move(request, target, "drain")
        finally:
            self._moving.discard(request.id)


class Planning(Generic[R]):
    """Places requests by the deployment's policy, and moves them by its planner.

    The requests are those of one proxy, or what many proxies report of theirs to a coordinator.

    Args:
        deployment: with its policies.
        instances: of the deployment, in its order.
        background: runs something.

    Attributes:
        placements: which requests are on which instance.
        placer: gives requests their places.
        telemetry: what the engines publish; None if none does.
        forecasts: of remaining lengths, from that.

    Raises:
        DeploymentError: unknown policy, or one whose forecasts no instance publishes.
    """

    def __init__(
        self,
        deployment: Deployment,
        instances: Sequence[InstanceState],
        background: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        policy, self._planner = deployed_policy(deployment), _planner(deployment)
        self.placements: Placements[R] = Placements()
        self._background = background
        self._prefills = [one for one in instances if one.instance.role == "prefill"]
        self._decodes = [one for one in instances if one.instance.role == "decode"]
        self._ejections = Ejections(instances)
        endpoints = {i.telemetry: i.name for i in deployment.instances if i.telemetry is not None}
        self.forecasts, budgets = None, None
        self.telemetry: TelemetrySubscriber | None = None
        if endpoints:
            view = TelemetryView(history=False)
            self.telemetry = TelemetrySubscriber(endpoints, keys=deployment.keys_folder, view=view)
            self.forecasts = LiveForecasts(self.telemetry)
            if policy.needs_budget:
                budgets = PrefillBudgets(self.telemetry)
        self.placer: Dispatcher[R] = Dispatcher(
            self.placements,
            self._prefills,
            self._decodes,
            policy,
            self.forecasts,
            budgets,
            deployment.proxy,
            asyncio.get_running_loop().time,
        )

    def began(self, request: R) -> None:
        """Note a request that has just arrived."""
        if self.forecasts is not None:
            self.forecasts.began(request)

    def ended(self, request: R, by_itself: bool) -> None:
        """Note a request's end, and learn from its length if it ended by itself."""
        if self.forecasts is not None:
            self.forecasts.ended(request, by_itself)

    def failed(self, instance: InstanceState, certain: bool) -> None:
        """Count a failure against an instance; certain: nothing listens there."""
        self._ejections.count(instance, certain)

    def compile(self) -> None:
        """Decide once, so that no request waits for a compiler."""
        self.placer.compile()
        if self._planner is not None:
            self._planner[0].plan(crowded_view())

    def drainer(self, mover: Mover[R]) -> Drainer[R]:
        """Return what empties instances.

        Args:
            mover: carries moves out.
        """
        return Drainer(self.placements, self._decodes, self.placer, mover, self._background)

    def loops(
        self, mover: Mover[R], planned: Callable[[float], None]
    ) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield what has to run for as long as requests do.

        Args:
            mover: carries moves out.
            planned: is told how many seconds each decision of the planner took.
        """
        if self._planner is not None:
            policy, seconds = self._planner
            yield PlannerLoop(
                policy,
                seconds,
                self.placements,
                self._decodes,
                self.forecasts,
                self.placer,
                mover,
                planned,
                self._background,
            ).run()

    def close(self) -> None:
        """Hear the engines no more."""
        if self.telemetry is not None:
            self.telemetry.close()


def _planner(deployment: Deployment) -> tuple[MigrationPolicy, float] | None:
    """Create the planner, with its interval in seconds.

    Raises:
        DeploymentError: unknown planner, or one that this deployment cannot serve.
    """
    if deployment.migration is None:
        return None
    section = dict(deployment.migration)
    seconds = float(section.pop("interval_seconds", 1.0))
    try:
        planner = create_migration_policy(**section)
    except ValueError as error:
        raise DeploymentError(f"migration: {error}") from error
    if planner.needs >= Needs.LENGTHS and not any(i.telemetry for i in deployment.decode):
        raise DeploymentError(
            f"migration.name: {planner.name} requires forecasts, and no decode instance has "
            "telemetry"
        )
    if not any(i.control for i in deployment.decode):
        raise DeploymentError("migration: no decode instance has a control socket to move by")
    return planner, seconds
