"""A routing policy whose failures delay nobody."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import SurvivalForecast
from rescheduler.cluster.cluster_view import CANNOT_MOVE, NEVER_MOVED, UNLIMITED, ClusterView
from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.migration import MigrationPolicy, create_migration_policy
from rescheduler.ordering import ServiceOrder, create_order
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Placeable, Placements, R
from rescheduler.routing.heuristics import JSQLoad
from rescheduler.routing.policy import Needs, RoutingPolicy, create_policy
from rescheduler.telemetry.subscriber import TelemetrySubscriber

_ELSEWHERE = -1
"""In place of the index of an instance that is not shown."""

_MOST_GENERATED = 2**30
"""Of one request, so that sums of many do not overflow."""


def running_requests(placements: Placements[R], instances: Sequence[InstanceState]) -> list[R]:
    """Return the requests on these instances, in the order of `cluster_view`."""
    return [request for instance in instances for request in placements.on(instance)]


def longest_prompt(instances: Sequence[InstanceState]) -> int:
    """Return the tokens of the longest prompt that each of these instances takes.

    They serve one model. If one says more than the others, nothing waits for room that only it has.
    """
    return min(map(_longest, instances), default=int(UNLIMITED))


def cluster_view(
    placements: Placements[R],
    instances: Sequence[InstanceState],
    waiting: Sequence[Placeable],
    forecasts: LiveForecasts | None,
    now: float,
    step_seconds: float,
    dispatched: int = 0,
    prefill_budget: np.ndarray | None = None,
    count_others: bool = False,
) -> ClusterView:
    """Return the view of some decode instances.

    A request that is on its way counts at its target. A request generates one token a decode
    step, so that the tokens since its last move are the steps since then. A prompt whose length
    is guessed counts as no longer than what the instances take: one that is longer waits for no
    room, and the engine answers that it is too long.

    Args:
        placements: of all requests.
        instances: that requests may go to.
        waiting: requests that wait for one of them, in order of arrival.
        forecasts: of remaining lengths; None if the decision needs none.
        now: seconds on the clock of ``waiting_since``.
        step_seconds: mean duration of a decode step lately.
        dispatched: requests placed so far.
        prefill_budget: tokens of prompts that each instance can compute in time, if it is known.
        count_others: count requests of other clients, behind all of this process.
    """
    longest = longest_prompt(instances)
    index: dict[InstanceState | None, int] = {instance: g for g, instance in enumerate(instances)}
    listed = [placements.on(instance) for instance in instances]
    running: list[Placeable] = [request for requests in listed for request in requests]
    here = np.repeat(np.arange(len(listed)), _integers(list(map(len, listed))))
    others = [instance.others if count_others else [] for instance in instances]
    running += [request for requests in others for request in requests]
    here = np.append(here, np.repeat(np.arange(len(others)), _integers(list(map(len, others)))))
    where = _integers([index.get(request.destination, _ELSEWHERE) for request in running])
    generating = np.array([request.generating for request in running], dtype=bool)
    since = np.full(len(running), CANNOT_MOVE, dtype=np.int64)
    for i, request in enumerate(running):
        if request.can_move:
            before = request.generated_at_move
            since[i] = NEVER_MOVED if before is None else _generated(request) - before
    return ClusterView(
        slots=_integers([instance.slots for instance in instances]),
        kv_capacity=_integers([instance.kv_capacity for instance in instances]),
        queued=np.bincount(here[~generating], minlength=len(listed)),
        instance=np.where(where == _ELSEWHERE, here, where),
        prompt_tokens=_integers(
            [
                min(request.prompt_tokens, longest_there)
                for request, longest_there in zip(
                    running, [_longest(instances[g]) for g in here.tolist()], strict=True
                )
            ]
        ),
        generated_tokens=_integers([_generated(request) for request in running]),
        forecast=forecasts.forecast(running) if forecasts else None,
        waiting_prompt_tokens=_integers([min(one.prompt_tokens, longest) for one in waiting]),
        waiting_generated_tokens=_integers([_generated(request) for request in waiting]),
        waiting_forecast=forecasts.forecast(waiting) if forecasts else None,
        waited_steps=_integers(
            [int((now - request.waiting_since) / step_seconds) for request in waiting]
        ),
        dispatched=dispatched,
        since_move=since,
        prefill_budget=prefill_budget,
        step_seconds=step_seconds,
    )


def _longest(instance: InstanceState) -> int:
    return instance.engine.max_model_len if instance.engine else int(UNLIMITED)


def _generated(request: Placeable) -> int:
    return min(request.generated_tokens, _MOST_GENERATED)


def _integers(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


logger = logging.getLogger("headway.serve")

_SLOW_SECONDS = 0.25
_REST_SECONDS = 30.0


class GuardedPolicy:
    """Decides by a policy, or by the least KV load where the policy raises or is slow.

    The event loop, and with it every stream, waits for a decision. So after one that computed
    for more than 0.25 s the policy rests for 30 s, as it does after it raised.

    Args:
        computed: seconds that this thread has computed.

    Attributes:
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


def deployed_policy(deployment: Deployment) -> RoutingPolicy:
    """Create the routing policy.

    Raises:
        DeploymentError: unknown policy, or one whose forecasts or budgets no instance publishes.
    """
    section = {name: value for name, value in deployment.routing.items() if name != "shadow"}
    return _deployed_policy(deployment, section, "routing")


def deployed_shadow(deployment: Deployment) -> RoutingPolicy | None:
    """Create the policy of ``routing.shadow``, if there is one.

    Raises:
        DeploymentError: as `deployed_policy`; or it has to be shown every instance.
    """
    section = deployment.routing.get("shadow")
    if section is None:
        return None
    if not isinstance(section, dict) or not isinstance(section.get("name"), str):
        raise DeploymentError("routing.shadow.name: the policy's name is required")
    policy = _deployed_policy(deployment, section, "routing.shadow")
    if policy.whole_cluster:
        raise DeploymentError(f"routing.shadow: {policy.name} must be shown every instance")
    return policy


def _deployed_policy(deployment: Deployment, section: dict[str, Any], where: str) -> RoutingPolicy:
    try:
        policy = create_policy(**section)
        if section.get("solver") == "exact":
            raise ValueError("solver: exact may take seconds, for which every stream would wait")
        policy.refuse_other_cluster(len(deployment.decode))
    except ValueError as error:
        raise DeploymentError(f"{where}: {error}") from error
    if policy.needs_budget and deployment.prefill:
        raise DeploymentError(
            f"{where}.name: {policy.name} chooses between engines that prefill and decode; here "
            f"{deployment.prefill[0].name} prefills for the others"
        )
    if policy.needs_budget and not all(i.telemetry for i in deployment.decode):
        raise DeploymentError(
            f"{where}.name: {policy.name} requires the prefill budget of every instance, "
            "and some have no telemetry"
        )
    if policy.needs >= Needs.LENGTHS and not any(i.telemetry for i in deployment.decode):
        raise DeploymentError(
            f"{where}.name: {policy.name} requires forecasts, and no decode instance has telemetry"
        )
    return policy


def deployed_order(deployment: Deployment) -> ServiceOrder:
    """Create the order of service.

    Raises:
        DeploymentError: unknown order, or an option that it refuses.
    """
    section = {name: value for name, value in deployment.order.items() if name != "shadow"}
    return _deployed_order(section, "order")


def deployed_shadow_order(deployment: Deployment) -> ServiceOrder | None:
    """Create the order of ``order.shadow``, if there is one.

    Raises:
        DeploymentError: as `deployed_order`; or it asks for fairness, which nobody is charged for
            by an order that does not act.
    """
    section = deployment.order.get("shadow")
    if section is None:
        return None
    if not isinstance(section, dict) or not isinstance(section.get("name"), str):
        raise DeploymentError("order.shadow.name: the order's name is required")
    order = _deployed_order(section, "order.shadow")
    if order.fairness:
        raise DeploymentError("order.shadow.fairness: only the order that acts can be fair")
    return order


def _deployed_order(section: dict[str, Any], where: str) -> ServiceOrder:
    try:
        return create_order(**section)
    except (ValueError, TypeError) as error:
        raise DeploymentError(f"{where}: {error}") from error


class DeployedPlanner(NamedTuple):
    """A planner, every how many seconds it plans, and whether its moves are made."""

    policy: MigrationPolicy
    seconds: float
    acts: bool


def deployed_planner(deployment: Deployment) -> DeployedPlanner | None:
    """Create the planner.

    Raises:
        DeploymentError: unknown planner, or one that this deployment cannot serve.
    """
    if deployment.migration is None:
        return None
    section = dict(deployment.migration)
    seconds = float(section.pop("interval_seconds", 1.0))
    shadow = section.pop("shadow", False)
    if not isinstance(shadow, bool):
        raise DeploymentError(f"migration.shadow: true or false, not {shadow!r}")
    try:
        planner = create_migration_policy(**section)
    except ValueError as error:
        raise DeploymentError(f"migration: {error}") from error
    emulate = deployment.engine.emulate
    if emulate is not None and planner.profile is None:
        # What a move costs is dilated as the steps are that it is compared with.
        planner = replace(
            planner,
            handshake_seconds=planner.handshake_seconds * emulate.dilation,
            bandwidth=planner.bandwidth / emulate.dilation,
        )
    if planner.needs >= Needs.LENGTHS and not any(i.telemetry for i in deployment.decode):
        raise DeploymentError(
            f"migration.name: {planner.name} requires forecasts, and no decode instance has "
            "telemetry"
        )
    if not any(i.control for i in deployment.decode):
        raise DeploymentError("migration: no decode instance has a control socket to move by")
    return DeployedPlanner(planner, seconds, not shadow)


_MOST_SENT = 1024
"""Prompts that may have been sent to an engine since its last report."""


class PrefillBudgets:
    """The engines' prefill budgets, less the prompts that an engine's report cannot know of.

    Those are the prompts sent to it since its last report, and those that were still on their way
    when it came. An engine reckons its budget with its first step. Until then it counts as having
    as much as the one that has most.

    Source: FairBatching (Lyu et al. 2025), §3.4.
    """

    def __init__(self, telemetry: TelemetrySubscriber) -> None:
        self._telemetry = telemetry
        self._seen: dict[str, tuple[int, int]] = {}
        self._sent: dict[str, dict[Placeable, int]] = {}

    def left(self, instances: Sequence[InstanceState]) -> npt.NDArray[np.float64]:
        """Return the budgets of some instances now, [G], in tokens."""
        budget: dict[str, float] = {}
        with self._telemetry.lock:
            for key, view in self._telemetry.view.instances.items():
                snapshot = view.epoch, view.snapshot_seq
                if self._seen.get(key.name) != snapshot:
                    self._seen[key.name] = snapshot
                    sent = self._sent.get(key.name, {})
                    self._sent[key.name] = {
                        request: tokens for request, tokens in sent.items() if request.on_its_way
                    }
                if view.gauges.prefill_budget is not None:
                    budget[key.name] = view.gauges.prefill_budget
        most = max(budget.values(), default=0.0)
        return np.array(
            [
                budget.get(one.name, most) - sum(self._sent.get(one.name, {}).values())
                for one in instances
            ]
        )

    def spend(self, instance: InstanceState, request: Placeable) -> None:
        """Count the prompt of a request that is being sent to an instance."""
        sent = self._sent.setdefault(instance.name, {})
        sent[request] = request.prompt_tokens
        if len(sent) > _MOST_SENT:  # it reports nothing
            del sent[next(iter(sent))]


def guarded_view(
    purpose: Literal["placing", "planning", "page"],
    placements: Placements[R],
    instances: Sequence[InstanceState],
    waiting: Sequence[Placeable],
    forecasts: LiveForecasts | None,
    now: float,
    step_seconds: float,
    dispatched: int = 0,
    budgets: PrefillBudgets | None = None,
) -> tuple[list[InstanceState], ClusterView]:
    """Return the instances that can be viewed, and the view of them.

    An instance of which no view can be built by itself, whatever it says of itself, is left out
    and noted. If the view of all others still fails, it is built without forecasts and budgets.
    """

    def view(
        shown: Sequence[InstanceState],
        waiting: Sequence[Placeable],
        forecasts: LiveForecasts | None = forecasts,
        budgets: PrefillBudgets | None = budgets,
    ) -> ClusterView:
        left = None if budgets is None else budgets.left(shown)
        return cluster_view(
            placements,
            shown,
            waiting,
            forecasts,
            now,
            step_seconds,
            dispatched,
            left,
            count_others=purpose == "placing",
        )

    try:
        return list(instances), view(instances, waiting)
    except Exception as error:
        failure = error
    shown = []
    for instance in instances:
        try:
            view([instance], [])
        except Exception as error:
            instance.leave_out(purpose, error)
        else:
            shown.append(instance)
    if len(shown) < len(instances):
        try:
            return shown, view(shown, waiting)
        except Exception as error:
            failure = error
    logger.debug("%s without forecasts and budgets", purpose, exc_info=failure)
    return shown, view(shown, waiting, None, None)


_RUNNING, _WAITING = 4, 2


def crowded_view(n_instances: int = 2) -> ClusterView:
    """Return instances of which one has all requests, so that planners have much to move."""
    none = np.zeros(n_instances, dtype=np.int64)
    running, waiting = np.full(_RUNNING, 100), np.full(_WAITING, 100)
    return ClusterView(
        slots=none + 2 * _RUNNING,
        kv_capacity=none + UNLIMITED,
        queued=none,
        instance=np.zeros(_RUNNING, dtype=np.int64),
        prompt_tokens=running,
        generated_tokens=running,
        forecast=_forecast(_RUNNING),
        waiting_prompt_tokens=waiting,
        waiting_generated_tokens=waiting,
        waiting_forecast=_forecast(_WAITING),
        waited_steps=np.zeros(_WAITING, dtype=np.int64),
        prefill_budget=np.zeros(n_instances),
    )


def _forecast(n: int) -> SurvivalForecast:
    """Return curves of requests that have a hundred thousand tokens to go, in the mean."""
    edges = np.array([0.0, 1e3, 1e6])
    survival = np.tile(np.exp(-edges / 1e5), (n, 1))
    return SurvivalForecast.new(edges, survival, np.full(n, np.inf))
