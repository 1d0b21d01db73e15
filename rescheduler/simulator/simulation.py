"""One run of a policy on the simulated cluster, from Python."""

from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import Forecast, PointForecast, SurvivalForecast
from rescheduler.batching.batch_formation import prefill_budget
from rescheduler.cluster.cluster_view import ClusterView
from rescheduler.commands.event_loop import held_interrupts
from rescheduler.migration import MigrationPolicy, create_migration_policy
from rescheduler.ordering import ServiceOrder, create_order
from rescheduler.ordering.expected_rest import RestByAge
from rescheduler.ordering.service_order import FirstComeFirstServed
from rescheduler.routing import Needs, RoutingPolicy, create_policy
from rescheduler.routing.policy import NO_KERNEL, kernel_of
from rescheduler.simulator.config.rules import Prefill, Rules, cluster_rules, service_rules
from rescheduler.simulator.config.simulation_config import PolicyChoice, SimulationConfig, checked
from rescheduler.simulator.engine.decode_step import new_batch_arrays
from rescheduler.simulator.engine.engine import EngineParts, advance, apply_target
from rescheduler.simulator.engine.engine_state import (
    NONE,
    Wanted,
    new_arrivals,
    new_cluster,
    new_policy_state,
    new_rests,
    new_series,
    with_accounts,
    with_more_rows,
    with_rests_of,
    with_wider_pool,
)
from rescheduler.simulator.engine.routing_inputs import gather_placed, simulated_migration_inputs
from rescheduler.simulator.engine.step_metrics import power_model
from rescheduler.simulator.forecasts.forecast_arrays import (
    CURVE,
    MARGINAL,
    POINT,
    ForecastArrays,
    expected_remaining,
    knows_ends,
)
from rescheduler.simulator.forecasts.forecast_sources import ForecastSource, create_forecast
from rescheduler.simulator.results.metrics import LoadSeries, RequestRecords, RunResult
from rescheduler.simulator.workloads.trace import ReplayTrace, Trace, first_requests, timed_blocks
from rescheduler.simulator.workloads.trace_files import create_trace
from rescheduler.step_time.step_time import StepTime, create_step_time


@dataclass(frozen=True)
class RunSetup:
    """What all runs of a simulation share.

    Attributes:
        config: of the simulation; its plain values (cluster, clock, pool_limit, drift ...) are
            read from here.
        trace: its requests; a run draws its own blocks with a generator of its seed.
        forecast: published to the policies.
        step_time: seconds of a step.
    """

    config: SimulationConfig
    trace: Trace
    forecast: ForecastSource
    step_time: StepTime


class Candidate(NamedTuple):
    """A routing policy, a migration planner and an order of service, created.

    Attributes:
        policy: places requests.
        planner: moves them; None moves nothing.
        setup: of its runs, with the forecasts that are published to it.
        order: in which waiting requests are served.
    """

    policy: RoutingPolicy
    planner: MigrationPolicy | None
    setup: RunSetup
    order: ServiceOrder


def run_setup(config: SimulationConfig) -> RunSetup:
    """Return what a configuration describes.

    Raises:
        ValueError: an unknown name or option, or a value that is refused, with its key.
    """
    trace = checked("trace", create_trace, config.trace)
    if config.arrivals.kind == "trace" and not trace.has_arrivals:
        raise ValueError(
            f"arrivals.kind: trace, but {trace.name} has no arrival times; "
            "choose revelation, poisson or gamma"
        )
    forecast = checked("forecast", create_forecast, config.forecast)
    forecast.refuse_other_trace(trace)
    slots = config.cluster.slots
    step_time = checked("step_time", partial(create_step_time, slots=slots), config.step_time)
    service_rules(config, step_time)
    return RunSetup(config, trace, forecast, step_time)


def create_policies(config: SimulationConfig) -> dict[str, RoutingPolicy]:
    """Return the configured policies by label.

    Raises:
        ValueError: an unknown policy or option, with its key.
    """
    return {
        choice.label: checked(
            f"policies.{i}", create_policy, {"name": choice.name} | choice.options
        )
        for i, choice in enumerate(config.policy_choices())
    }


def create_candidates(setup: RunSetup) -> dict[str, Candidate]:
    """Return every configured policy with every configured planner and order, by label.

    Raises:
        ValueError: an unknown policy, planner, order or option, with its key.
    """
    config = setup.config
    policies = create_policies(config)
    planners = {}
    for i, choice in enumerate(config.planner_choices()):
        planners[choice.label] = _planner(setup, f"migration.planners.{i}", choice)
    orders = {
        choice.label: checked(f"orders.{i}", create_order, {"name": choice.name} | choice.options)
        for i, choice in enumerate(config.order_choices())
    }
    found = {}
    for candidate in config.candidate_choices():
        planner, forecast = planners[candidate.planner.label]
        own = setup if forecast is None else replace(setup, forecast=forecast)
        policy, order = policies[candidate.policy.label], orders[candidate.order.label]
        found[candidate.label] = Candidate(policy, planner, own, order)
    return found


def _planner(
    setup: RunSetup, key: str, choice: PolicyChoice
) -> tuple[MigrationPolicy | None, ForecastSource | None]:
    """Return the planner, and its own forecasts if it has any."""
    options, transfer = dict(choice.options), setup.config.transfer
    own_forecast = options.pop("forecast", None)
    forecast = None
    if own_forecast is not None:
        forecast = checked(f"{key}.forecast", create_forecast, own_forecast)
        forecast.refuse_other_trace(setup.trace)
    if choice.name == "none":
        return checked(key, _nobody, options), forecast
    costs = {
        "handshake_seconds": transfer.handshake_s,
        "bandwidth": transfer.gigabits_per_second * 1e9 / 8,
        "kv_bytes_per_token": transfer.bytes_per_token,
    }
    planner = checked(key, create_migration_policy, {"name": choice.name} | costs | options)
    return planner, forecast


def _nobody() -> None:
    """Return the planner called none."""


IntArray = npt.NDArray[np.int64]

_SAMPLE_REQUESTS = 20_000
_OTHER_DRAW = 1_000_003


def run(
    setup: RunSetup,
    policy: RoutingPolicy,
    seed: int,
    label: str | None = None,
    planner: MigrationPolicy | None = None,
    order: ServiceOrder | None = None,
) -> RunResult:
    """Simulate one policy from the first request to the last.

    Args:
        setup: the cluster, the requests, the forecasts.
        policy: places them.
        seed: of the requests drawn, of their arrivals, and of noise in forecasts.
        label: what the result calls the policy; its name when None.
        planner: moves running requests; None moves nothing.
        order: in which waiting requests are served; as they come when None.

    Raises:
        ValueError: a request that no instance can hold, or a broken line of the trace.
        RuntimeError: the policy leaves requests waiting that could be placed.
    """
    simulation = Simulation(setup, policy, seed, planner, order)
    simulation.advance()
    return simulation.result(label or policy.name)


class Simulation:
    """A cluster under simulation, which can be paused, looked at, and interfered with.

    Attributes:
        engine: what the compiled engine works on; `provide` may put other arrays into it.
    """

    def __init__(
        self,
        setup: RunSetup,
        policy: RoutingPolicy,
        seed: int,
        planner: MigrationPolicy | None = None,
        order: ServiceOrder | None = None,
    ) -> None:
        config, self.order = setup.config, order or FirstComeFirstServed()
        self.seed = seed
        self.done = False
        policy.refuse_other_cluster(config.cluster.instances)
        known = None
        early = config.prefill.kind == "chunked" and setup.forecast.of_hidden_states
        if setup.forecast.needs_lengths or policy.needs_lengths or early:
            # Known before: of other draws, or a file's first ones.
            generator = np.random.default_rng((seed, _OTHER_DRAW))
            known = first_requests(setup.trace, generator, _SAMPLE_REQUESTS).output
        self.policy = policy if known is None else policy.with_lengths(known)
        self.forecast: ForecastArrays = setup.forecast.arrays(known, seed)
        if early:
            self.forecast = setup.forecast.before_prefill(self.forecast, known)
        for asked, needs, kind in (
            (self.policy, self.policy.needs >= Needs.LENGTHS, "policy"),
            (planner, planner is not None and planner.needs >= Needs.LENGTHS, "planner"),
            (self.order, self.order.needs_lengths, "order"),
        ):
            if asked and needs and self.forecast.kind == 0:
                raise ValueError(
                    f"{asked.name} needs forecasts, but forecast.name is none; choose oracle, "
                    f"kaplan_meier, replay, or another {kind}"
                )
        if (
            self.policy.needs_curves
            and self.forecast.kind == POINT
            and not knows_ends(self.forecast)
        ):
            raise ValueError(
                f"{self.policy.name} goes by how uncertain lengths are, which forecast.name "
                f"{setup.forecast.name} does not say; choose kaplan_meier, replay, oracle, or "
                "another policy"
            )
        self.planner = planner
        rules = cluster_rules(config, setup.step_time, self.policy, planner)
        servers = config.prefill.instances if config.prefill.kind == "stage" else 0
        kernel, ordering = kernel_of(self.policy), self.order.parameters()
        self._kernel = NO_KERNEL if kernel is None else kernel
        trace, self._learner = setup.trace, setup.forecast.learner()
        self._caps = np.empty(0, dtype=np.int64)
        if isinstance(trace, ReplayTrace) and self._learner is None:  # whose templates are others
            self._caps = trace.recorded.max_tokens
        self._lengths = [RestByAge() for _ in range(rules.n_instances if rules.suspends else 0)]
        self._ended, self._longest = np.zeros((2, rules.n_instances), dtype=np.int64)
        self._noted = 0
        cluster = new_cluster(rules, servers)
        cluster.instances["budget"] = _idle_budget(rules)
        self.engine = EngineParts(
            rules=rules,
            step_time=setup.step_time,
            power_model=power_model(config.power),
            policy_state=new_policy_state(
                rules, self.policy, kernel is None, self.forecast, ordering
            ),
            rests=new_rests(rules, self.forecast, self._caps),
            cluster=cluster,
            batch=new_batch_arrays(len(cluster.requests)),
            arrivals=new_arrivals(rules, servers),
            series=new_series(rules),
        )
        self._points = np.empty(0, dtype=np.int64) if planner is None else planner.points()
        generator = np.random.default_rng(seed)
        arrivals = config.arrivals
        self._blocks = timed_blocks(
            setup.trace, generator, arrivals.kind, arrivals.scale, arrivals.rate, arrivals.cv
        )
        if self._learner is not None:
            self._blocks = self._learner.forecast(self._blocks)
        self._finished: list[RequestRecords] = []

    @property
    def _scalars(self) -> Any:
        """The engine's own record, which keeps what is written to it."""
        return self.engine.cluster.scalars[0]

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return float(self._scalars["now"])

    @property
    def joules(self) -> float:
        """Energy of all GPUs so far, utilisation being own load / max load."""
        return float(self._scalars["energy_load_joules"])

    def advance(self, until: float = inf) -> bool:
        """Simulate to a time, or to the end; return whether there is more to do.

        Raises:
            ValueError, RuntimeError: as `run`.
        """
        while not self.done:
            with held_interrupts():
                wanted = advance(self.engine, self._kernel, until)
            if wanted == Wanted.PAUSED:
                return True
            self.provide(wanted)
        return False

    def provide(self, wanted: int) -> None:
        """Do what the engine returned for, which is not `Wanted.PAUSED`."""
        match wanted:
            case Wanted.DONE:
                self.done = True
            case Wanted.TRACE:
                self._next_block()
            case Wanted.GROW:
                cluster = with_more_rows(self.engine.cluster)
                batch = new_batch_arrays(len(cluster.requests))
                self.engine = self.engine._replace(cluster=cluster, batch=batch)
            case Wanted.WIDEN:
                arrivals, state = with_wider_pool(self.engine.arrivals, self.engine.policy_state)
                self.engine = self.engine._replace(arrivals=arrivals, policy_state=state)
            case Wanted.FLUSH:
                self._flush()
            case Wanted.ASK:
                self._ask()
            case Wanted.PLAN:
                self._plan()
            case Wanted.LEARN:
                self._learn()
            case Wanted.STUCK:
                raise RuntimeError(
                    f"{self.policy.name} leaves {self._scalars['in_system']} requests "
                    "waiting on an idle cluster: nothing would ever happen again"
                )
            case Wanted.OVERSIZED:
                self._refuse_oversized()

    def view(self, shown: int | None = None) -> ClusterView:
        """Return the cluster as a policy sees it; queued requests are among the running ones.

        Args:
            shown: so many of the waiting requests, in the order of service; all when None.
        """
        rules, requests, placed = self.engine.rules, self.engine.cluster.requests, self._placed()
        pool = self.engine.arrivals.pool[: self._scalars["waiting"]][:shown]
        instances = self.engine.cluster.instances
        prompt = requests["prompt"][placed["row"]]
        waiting_prompt = requests["prompt"][pool]
        return ClusterView(
            slots=np.full(rules.n_instances, rules.slots),
            kv_capacity=rules.kv_capacity - instances["leaving_tokens"],
            queued=instances["queued"] + instances["arriving"],
            instance=placed["instance"].copy(),
            prompt_tokens=prompt,
            generated_tokens=placed["context"] - prompt,
            forecast=self._forecast(placed["row"], placed["generated"]),
            waiting_prompt_tokens=waiting_prompt,
            waiting_generated_tokens=requests["context"][pool] - waiting_prompt,
            waiting_forecast=self._forecast(pool, requests["generated"][pool]),
            waited_steps=self._scalars["steps"] - requests["entered"][pool],
            dispatched=int(self._scalars["dispatched"]),
            instant=rules.queueing,
            since_move=placed["since_move"].copy(),
            prefill_budget=instances["budget"].copy() if rules.service.reports else None,
        )

    def running_numbers(self) -> IntArray:
        """Return which request of the trace each running request of the view is, [n_running]."""
        numbers: IntArray = self.engine.cluster.requests["number"][self._placed()["row"]]
        return numbers

    def waiting_numbers(self) -> IntArray:
        """Return which request of the trace each waiting request of the view is, [n_waiting]."""
        pool = self.engine.arrivals.pool[: self._scalars["waiting"]]
        numbers: IntArray = self.engine.cluster.requests["number"][pool]
        return numbers

    def migrate(self, number: int, target: int) -> None:
        """Move a decoding request to another instance once its step has ended.

        It is frozen while its context travels (handshake + tokens / bandwidth), keeps its memory
        at the source until it has arrived, and has room kept for it at the target. If there is
        none by then, it stays where it is.

        Raises:
            ValueError: no such request decodes, or it is to go where it is; or decodes may sit
                steps out, with which migration is not simulated.
        """
        rules, cluster = self.engine.rules, self.engine.cluster
        if rules.service.forms:
            raise ValueError("migration is not simulated where decodes may sit a step out")
        if not 0 <= target < rules.n_instances:
            raise ValueError(f"instance {target} is not one of {rules.n_instances}")
        for g in range(rules.n_instances):
            rows = cluster.slot_request[g, : cluster.instances["decoding"][g]]
            for row in rows[cluster.requests["number"][rows] == number]:
                if g == target:
                    raise ValueError(f"request {number} is on instance {g} already")
                self._send(row, target)
                return
        raise ValueError(f"no request {number} is decoding")

    def result(self, label: str) -> RunResult:
        """Return what has been measured so far."""
        self._flush()
        scalars, rules = self._scalars, self.engine.rules
        cluster, series = self.engine.cluster, self.engine.series
        weight = max(float(scalars["weight"]), 1e-300)
        means = ("imbalance", "max_minus_min", "idle_share", "execution_variance")
        sums = ("busy_seconds", "energy_load_joules", "energy_mfu_joules")
        counts = ("tokens", "most_held", "preemptions", "migrations", "decisions", "plans")
        figures: dict[str, Any] = {name: float(scalars[name]) / weight for name in means}
        figures |= {name: float(scalars[name]) for name in sums}
        figures |= {name: int(scalars[name]) for name in counts}
        samples = series.samples[: scalars["samples"]]
        steps = scalars["recorded"] if rules.barrier else scalars["all_steps"]
        return RunResult(
            policy=label,
            seed=self.seed,
            n_instances=rules.n_instances,
            requests=RequestRecords(*map(np.concatenate, zip(*self._finished, strict=True))),
            prefilled_first_token=rules.prefill != Prefill.NONE,
            steps=int(steps),
            seconds=float(scalars["last_end"]),
            itl_histogram=cluster.histogram.copy(),
            itl_edges=cluster.histogram_edges.copy(),
            series=LoadSeries(
                load=series.load[: len(samples)].copy(),
                **{name: samples[name].copy() for name in LoadSeries._fields if name != "load"},
            ),
            **figures,
        )

    def _ask(self) -> None:
        shown = int(self._scalars["shown"])
        assigned = self.policy.assign(self.view(shown)).instance
        if len(assigned) != shown:
            raise RuntimeError(
                f"{self.policy.name} assigned {len(assigned)} requests, {shown} are waiting"
            )
        self.engine.arrivals.target[: self._scalars["waiting"]] = NONE
        self.engine.arrivals.target[:shown] = assigned
        apply_target(self.engine.rules, self.engine.cluster, self.engine.arrivals)

    def _plan(self) -> None:
        assert self.planner is not None
        inputs, rows = simulated_migration_inputs(
            self.engine.rules, self.forecast, self.engine.cluster, self._points
        )
        for migration in self.planner.decide(inputs).migrations:
            self._send(int(rows[migration.request]), migration.target)

    def _send(self, row: int, target: int) -> None:
        if self.engine.cluster.requests["target"][row] == NONE:
            self._scalars["leaving"] += 1
        self.engine.cluster.requests["target"][row] = target

    def _next_block(self) -> None:
        scalars, engine = self._scalars, self.engine
        self._note_finished()
        block = next(self._blocks, None)
        if block is None:
            scalars["last_block"] = 1
            return
        arrivals = engine.arrivals._replace(
            arrival=np.ascontiguousarray(block.arrival, dtype=np.float64),
            prompt=np.ascontiguousarray(block.prompt, dtype=np.int64),
            output=np.ascontiguousarray(block.output, dtype=np.int64),
            template=np.ascontiguousarray(block.template, dtype=np.int64),
            client=np.ascontiguousarray(block.client, dtype=np.int64),
        )
        cluster = with_accounts(engine.cluster, int(block.client.max(initial=0)) + 1)
        self.engine = engine._replace(arrivals=arrivals, cluster=cluster)
        scalars["cursor"] = 0
        scalars["block_length"] = len(block.prompt)

    def _note_finished(self) -> None:
        """Pass what has ended since the last call on to the learner and the instances."""
        records = self.engine.cluster.finished[self._noted : self._scalars["finished"]]
        self._noted = int(self._scalars["finished"])
        if self._learner is not None:
            self._learner.learn(records)
        for record in records if self._lengths else ():
            g, output = record["instance"], int(record["output"])
            if g != NONE and not np.isnan(record["end"]):
                was_cut = len(self._caps) > 0 and output >= self._caps[record["template"]]
                self._lengths[g].ended(output, was_cut)
                self._ended[g] += 1
                self._longest[g] = max(self._longest[g], output)

    def _learn(self) -> None:
        self._note_finished()
        instances = self.engine.cluster.instances
        for g in np.flatnonzero(instances["unlearned"] > instances["learn_after"]):
            if self._lengths[g].knows:
                by_age = self._lengths[g].at(np.arange(self._longest[g] + 1))
                self.engine = self.engine._replace(
                    rests=with_rests_of(self.engine.rests, g, by_age)
                )
                instances["learn_after"][g] = self._ended[g] // 16  # as often as it learns
            instances["unlearned"][g] = 0

    def _flush(self) -> None:
        self._note_finished()
        self._noted = 0
        count = int(self._scalars["finished"])
        finished = self.engine.cluster.finished[:count]
        columns = (finished[name].copy() for name in RequestRecords._fields)
        self._finished.append(RequestRecords(*columns))
        self._scalars["finished"] = 0

    def _refuse_oversized(self) -> None:
        at = int(self._scalars["cursor"])
        prompt, output = self.engine.arrivals.prompt[at], self.engine.arrivals.output[at]
        raise ValueError(
            f"request {self._scalars['oversized']} of the trace has a prompt of "
            f"{prompt} and generates {output} tokens, an instance holds "
            f"{self.engine.rules.kv_capacity}; raise cluster.kv_capacity or leave it out"
        )

    def _placed(self) -> npt.NDArray[np.void]:
        return self.engine.cluster.placed[: gather_placed(self.engine.cluster)]

    def _forecast(self, rows: IntArray, generated: IntArray) -> Forecast | None:
        f, requests = self.forecast, self.engine.cluster.requests
        if f.kind == 0:
            return None
        if f.kind == MARGINAL:
            edges = np.arange(len(f.table) + 1)
            curve = np.append(f.table, 0.0)
            return SurvivalForecast.new(edges, np.tile(curve, (len(rows), 1))).aged(generated)
        template = requests["template"][rows]
        if f.kind == CURVE:
            renewed = np.minimum(generated // f.interval, f.n_rows[template] - 1)
            curves = f.curves[f.first_row[template] + renewed]
            if len(f.prompt_row) > 0:
                known = f.curves[f.prompt_row[template]]
                curves = np.where(generated[:, None] > 0, curves, known)
            elif len(f.table) > 0:
                known = f.table[np.minimum(f.edges.astype(np.int64), len(f.table) - 1)]
                curves = np.where(generated[:, None] > 0, curves, known.astype(np.float32))
            limit = f.cap[template] - renewed * f.interval
            fresh = SurvivalForecast.new(f.edges, curves, limit)
            return fresh.aged(generated - renewed * f.interval)
        remaining = [
            expected_remaining(f, number, 0, n, output)
            for number, n, output in zip(
                requests["number"][rows], generated, requests["output"][rows], strict=True
            )
        ]
        return PointForecast.new(np.array(remaining, dtype=np.float64))


def _idle_budget(rules: Rules) -> float:
    """Return what an instance without requests reports; 0 if nothing is reported."""
    if not rules.service.reports:
        return 0.0
    none, whole, service = np.empty(0), np.empty(0, dtype=np.int64), rules.service
    return prefill_budget(
        service.batches, service.ttft, service.tpot, none, whole, whole, service.whole_steps
    )
