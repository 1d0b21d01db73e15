"""Deciding where requests go: everything of a deployment that places and moves, put together."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Generic

from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.migration import MigrationPolicy, create_migration_policy
from rescheduler.placement.deployed_policy import deployed_policy
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.ejections import Ejections
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Mover, R
from rescheduler.placement.placements import Placements
from rescheduler.placement.prefill_budgets import PrefillBudgets
from rescheduler.placement.warm_up import crowded_view
from rescheduler.proxy.drainer import Drainer
from rescheduler.proxy.planner_loop import PlannerLoop
from rescheduler.routing.policy import Needs
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.telemetry.telemetry_view import TelemetryView

__all__ = ["Planning"]


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
