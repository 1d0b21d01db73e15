"""The instances of a deployment, what is known of them, and what decides on their requests."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from math import inf
from typing import Any, Generic

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from predictor.live.zmq_sockets import shared_secret
from rescheduler.engines.deployment import Deployment
from rescheduler.monitoring.forecast_quality import ForecastMetrics, ForecastScores
from rescheduler.ordering import create_order
from rescheduler.placement.accounts import Accounts
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.engine_loads import LoadReader
from rescheduler.placement.evidence import allowance
from rescheduler.placement.guarded_policy import (
    DeployedPlanner,
    PrefillBudgets,
    crowded_view,
    deployed_order,
    deployed_planner,
    deployed_policy,
    deployed_shadow,
    deployed_shadow_order,
)
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import LengthFactors, MoveHistory, Placements, R
from rescheduler.placement.prober import Prober
from rescheduler.placement.shadows import ShadowOrder, ShadowPlans
from rescheduler.placement.upstream import Upstream, engine_key
from rescheduler.placement.waiting_line import Pool, WaitingLine
from rescheduler.step_time.profile import MeanStepTime
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.telemetry.telemetry_view import TelemetryView
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import KIND

logger = logging.getLogger("headway.serve")

LACKING = {
    "control": (
        "requests never move away alive, and other clients' load is read from /metrics only",
        "--kv-transfer-config with rescheduler.transfer.vllm_connector",
    ),
    "telemetry": (
        "no forecasts of lengths",
        "--worker-cls predictor.live.vllm_worker.LiveHeadwayWorker with its scheduler",
    ),
}
"""What a decode instance without an endpoint cannot do, and the flag of vLLM that adds it."""


class Cluster(Generic[R]):
    """What a proxy, a coordinator and a picker have in common; for one event loop.

    Whatever runs in the background runs here: an error in it is logged, and it ends with the
    cluster.

    Attributes:
        instances: by name.
        all: of them, in the order of the deployment.
        decodes: of them, those that decode.
        step: how long a decode step takes.
        line: says which request goes first; None: as they come, or another process does.
        moves: the latest.
        length_factors: how good forecasts were that were made as requests arrived.
        planner: plans moves; None: nothing does here.
        shadow_plans: counts its moves where they are not made.
        telemetry: what the engines publish; None if none does, or another process hears it.
        forecasts: of remaining lengths, from that.
        accounts: of the clients.

    Raises:
        DeploymentError: unknown policy, or one whose forecasts no instance publishes.
    """

    placements: Placements[R]
    dispatcher: Dispatcher[R]
    line: WaitingLine[R] | None = None

    def __init__(self, deployment: Deployment) -> None:
        options, keys = deployment.proxy, deployment.keys_folder
        self.deployment = deployment
        self.step = MeanStepTime()
        self.moves, self.length_factors = MoveHistory(), LengthFactors()
        self.planner: DeployedPlanner | None = None
        self.shadow_plans: ShadowPlans | None = None
        self.telemetry: TelemetrySubscriber | None = None
        self.forecasts: LiveForecasts | None = None
        self.instances: dict[str, InstanceState] = {}
        self._stack = AsyncExitStack()
        self._said_unlike = ""
        self._loops: set[asyncio.Task[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        for instance in deployment.instances:
            control = ControlClient(instance.control, keys) if instance.control else None
            if control is not None:
                self._stack.callback(control.close)
            self.instances[instance.name] = InstanceState(instance, options, control)
        key = engine_key(options)
        salt = shared_secret(keys, "watcher") if keys is not None else b""
        self.accounts = Accounts(options.accounts, checks_keys=key is not None, salt=salt)
        self.all = list(self.instances.values())
        self.decodes = [one for one in self.all if one.instance.role == "decode"]
        self._decide_by(deployment)
        self.upstream = Upstream(options, key)
        self._stack.push_async_callback(self.upstream.close)
        served = deployment.served_name
        self.prober = Prober(
            self.upstream,
            self.lost,
            self.dispatcher.wake,
            options,
            served,
            self._last_telemetry,
            self._longest_step,
            self._say_unlike,
        )

    def _decide_by(self, deployment: Deployment) -> None:
        """Make what places requests, and plans their moves: the deployment's policies."""
        policy, self.planner = deployed_policy(deployment), deployed_planner(deployment)
        if self.planner is not None and not self.planner.acts:
            self.shadow_plans = ShadowPlans(self.planner.policy.name)
        shadow = deployed_shadow(deployment)
        self.placements, budgets = Placements(), None
        endpoints = {i.telemetry: i.name for i in deployment.instances if i.telemetry is not None}
        if endpoints:
            view = TelemetryView(history=False)
            self.telemetry = TelemetrySubscriber(endpoints, keys=deployment.keys_folder, view=view)
            self._stack.callback(self.telemetry.close)
            self.forecasts = LiveForecasts(self.telemetry)
            if policy.needs_budget or (shadow is not None and shadow.needs_budget):
                budgets = PrefillBudgets(self.telemetry)
        clock = asyncio.get_running_loop().time
        order = deployed_order(deployment)
        if order.needs_lengths:
            self.line = WaitingLine(
                order,
                self.decodes,
                self.forecasts,
                self.step,
                clock,
                deployment.proxy.pool_seconds,
                self.accounts,
            )
        self.dispatcher = Dispatcher(
            self.placements,
            self.all,
            policy,
            deployment.proxy,
            self.step,
            clock,
            self.forecasts,
            budgets,
            Pool(self.line, self.accounts),
            self._background_pool(deployment, clock),
            shadow,
            self._shadow_order(deployment, clock),
        )

    def _shadow_order(
        self, deployment: Deployment, clock: Callable[[], float]
    ) -> ShadowOrder[R] | None:
        order = deployed_shadow_order(deployment)
        if order is None:
            return None
        longest = deployment.proxy.pool_seconds
        line = WaitingLine[R](order, self.decodes, self.forecasts, self.step, clock, longest)
        return ShadowOrder(line, order.name, clock)

    def _background_pool(self, deployment: Deployment, clock: Callable[[], float]) -> Pool[R]:
        """Return that of background requests: the shortest first, where anything says so.

        They may wait for hours: none is overdue by the clock alone.
        """
        accounts = Accounts(deployment.proxy.accounts)
        fairness = deployed_order(deployment).fairness
        if not fairness and self.forecasts is None and deployment.prompt_checkpoint is None:
            return Pool(None, accounts)
        order = create_order("shortest", fairness=fairness)
        line = WaitingLine[R](order, self.decodes, self.forecasts, self.step, clock, inf, accounts)
        return Pool(line, accounts)

    async def start(self) -> None:
        """Ask every instance how it is, and go on asking."""
        await asyncio.to_thread(self.compile)
        await asyncio.gather(*map(self.prober.probe, self.all))
        self._say_unlike()
        self._say_lacking()
        reader = LoadReader(self.upstream, self.placements, self.deployment.proxy.probe_seconds)
        for instance in self.all:
            self.forever(self.prober.run(instance))
            if instance.control is None:
                self.forever(reader.run(instance))

    def compile(self) -> None:
        """Decide once, so that no request waits for a compiler."""
        self.dispatcher.compile()
        if self.planner is not None:
            self.planner.policy.plan(crowded_view())

    def _say_unlike(self) -> None:
        """Log which engines cannot read each other's KV cache; prefills may have other ranks."""
        groups: dict[str, list[str]] = {}
        ranks = {one.kind[-1:] for one in self.decodes if one.kind is not None}
        for one in self.all:
            if one.kind is not None:
                only_read = one.instance.role == "prefill" or len(ranks) == 1
                compared = one.kind[:-1] if only_read else one.kind
                values = zip(KIND.values(), compared, strict=False)
                words = ", ".join(f"{what} {value!r}" for what, value in values)
                groups.setdefault(words, []).append(one.name)
        said = "; ".join(f"{', '.join(names)}: {words}" for words, names in groups.items())
        if len(groups) > 1 and said != self._said_unlike:
            logger.error("engines that cannot read each other's KV cache: %s", said)
        self._said_unlike = said

    def _say_lacking(self) -> None:
        """Log what engines without an endpoint of Headway's cannot do, and which flag adds it."""
        for endpoint, (cannot, flag) in LACKING.items():
            names = ", ".join(one.name for one in self.decodes if endpoint in one.without)
            if names:
                logger.info("%s: no `%s`: %s; %s adds it", names, endpoint, cannot, flag)

    async def close(self, patience: float = 0.0) -> None:
        """End what runs in the background, and close every connection.

        What was to end by itself is waited for, for so many seconds.
        """
        for loop in self._loops:
            loop.cancel()
        if self._tasks and patience:
            await asyncio.wait(self._tasks, timeout=patience)
        tasks = [*self._loops, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stack.aclose()

    @property
    def parses_again(self) -> bool:
        """Whether any decode instance that is known can parse an answer that another has begun."""
        known = [instance for instance in self.decodes if instance.engine is not None]
        return bool(known) and all(instance.parses_again for instance in known)

    def background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something that ends by itself."""
        return self._begun(work, self._tasks)

    def forever(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something for as long as the cluster is served."""
        self._begun(work, self._loops)

    def began(self, request: R) -> None:
        """Note a request that has just arrived."""
        self.dispatcher.arrived(request)
        if self.forecasts is not None:
            self.forecasts.began(request)

    def ended(self, request: R, by_itself: bool) -> None:
        """Note a request's end, and learn from its length if it ended by itself.

        Background requests, which may be of another kind, say nothing of others.
        """
        self.dispatcher.left(request, by_itself)
        by_itself = by_itself and not request.background
        if self.forecasts is not None:
            self.forecasts.ended(request, by_itself)
        if self.line is not None and by_itself:
            self.line.ended(request)
        shadow = self.dispatcher.shadow_order
        if shadow is not None and by_itself:
            shadow.line.ended(request)

    def failed(self, instance: InstanceState, certain: bool) -> None:
        """Count a failure against an instance.

        Whatever requests see, at least half of the instances of a role stay in service: where all
        of them fail, the cause is seldom the instances. What is certain, since nothing listens
        there, takes any instance out.

        Source: the design follows Envoy's outlier detection (``max_ejection_percent``).
        """
        if not (certain or self.may_leave(instance)):
            return
        if instance.breaker.failed(asyncio.get_running_loop().time(), certain):
            logger.warning("%s: out of service", instance.name)

    def lost(self, instance: InstanceState) -> None:
        """Take an instance out of service that has failed by its evidence."""
        logger.warning("%s: out of service: %s", instance.name, instance.evidence.why)
        instance.breaker.failed(asyncio.get_running_loop().time(), certain=True)
        self.dispatcher.wake()

    def _last_telemetry(self, instance: InstanceState) -> float | None:
        return None if self.telemetry is None else self.telemetry.heard(instance.name)

    def _longest_step(self, instance: InstanceState) -> float:
        """Return how long a step of an instance may take, with the prompts it may be computing."""
        requests = self.placements.on(instance)
        tokens = sum(request.context_tokens for request in requests if not request.generating)
        return allowance(self.deployment.proxy.token_seconds, 0, tokens)

    def may_leave(self, instance: InstanceState) -> bool:
        """Return whether half of the instances of its role would stay in service without it."""
        role = instance.instance.role
        peers = [one for one in self.all if one.instance.role == role]
        out = sum(not one.breaker.closed for one in peers if one is not instance)
        return 2 * (out + 1) <= len(peers)

    def _begun(
        self, work: Coroutine[Any, Any, Any], running: set[asyncio.Task[Any]]
    ) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        running.add(task)
        task.add_done_callback(running.discard)
        task.add_done_callback(_log_error)
        return task


def _log_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("in the background: %r", task.exception(), exc_info=task.exception())


INSTANCE = "instance_name"  # `instance` is Prometheus' own name of what it scrapes


class ClusterMetrics(Collector, Generic[R]):
    """Counters, histograms, and gauges that are read whenever Prometheus asks.

    Args:
        prefix: of their names.
        tasks: what is told of the event loop's tasks.
        others: of the same process.

    Attributes:
        scores: of the forecasts; None where no engine publishes any.
    """

    def __init__(
        self, cluster: Cluster[R], prefix: str, tasks: str, others: Sequence[Collector]
    ) -> None:
        self._cluster = cluster
        self._prefix = prefix
        self._tasks = tasks
        self._registry = CollectorRegistry()
        self._counter = partial(Counter, registry=self._registry)
        self._histogram = partial(Histogram, registry=self._registry)
        self.planning = self._histogram(
            f"{prefix}_migration_planning_seconds", "decisions of the migration planner"
        )
        for collector in (self, *others):
            self._registry.register(collector)
        self.scores: ForecastScores | None = None
        if cluster.telemetry is not None:
            self.scores = ForecastScores(cluster.telemetry)
            self._registry.register(ForecastMetrics(cluster.telemetry, self.scores))

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges as they are now."""
        dispatcher, prefix = self._cluster.dispatcher, self._prefix
        waiting = GaugeMetricFamily(
            f"{prefix}_num_requests_waiting", "requests that wait for an instance", labels=["stage"]
        )
        waiting.add_metric(["prefill"], dispatcher.waiting_for_prefill)
        waiting.add_metric(["decode"], len(dispatcher.waiting))
        gauge = partial(GaugeMetricFamily, labels=[INSTANCE, "role"])
        running = gauge(f"{prefix}_num_requests_running", "requests on an instance")
        background = gauge(
            f"{prefix}_num_background_requests_running", "those of background among them"
        )
        tokens = gauge(f"{prefix}_context_tokens", "context tokens of the requests on an instance")
        others = gauge(
            f"{prefix}_other_requests",
            "requests of other clients on an instance without a control socket, by its /metrics",
        )
        theirs = gauge(f"{prefix}_other_context_tokens", "tokens that those hold")
        up = gauge(f"{prefix}_instance_up", "1: in service")
        draining = gauge(f"{prefix}_instance_draining", "1: gets no requests")
        for instance in self._cluster.all:
            labels = [instance.name, instance.instance.role]
            requests = self._cluster.placements.on(instance)
            running.add_metric(labels, len(requests))
            background.add_metric(labels, sum(request.background for request in requests))
            tokens.add_metric(labels, sum(request.context_tokens for request in requests))
            if instance.control is None:
                others.add_metric(labels, len(instance.others))
                theirs.add_metric(labels, sum(r.context_tokens for r in instance.others))
            up.add_metric(labels, instance.breaker.closed)
            draining.add_metric(labels, instance.draining)
        yield GaugeMetricFamily(
            f"{prefix}_num_background_requests_waiting",
            "background requests that wait for an instance, beside the others",
            value=dispatcher.waiting_in_background,
        )
        yield from (waiting, running, background, tokens, others, theirs, up, draining)
        shadows = (dispatcher.shadow, dispatcher.shadow_order, self._cluster.shadow_plans)
        for shadow in shadows:
            if shadow is not None:
                yield from shadow.metrics(prefix)
        accounts, largest = self._cluster.accounts.at_work()
        yield GaugeMetricFamily(
            f"{prefix}_accounts", "accounts of clients that have requests", value=accounts
        )
        yield GaugeMetricFamily(
            f"{prefix}_largest_account_share",
            "of all requests, those of the account that has the most",
            value=largest,
        )
        tasks = len(asyncio.all_tasks())
        yield GaugeMetricFamily(f"{prefix}_event_loop_tasks", self._tasks, value=tasks)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)
