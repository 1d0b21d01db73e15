"""What a trace's simulations say of routers, orders and forecasts: gains, intervals, a choice."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from predictor.forecasts.forecast_recording import MEASURED_INTERVAL
from rescheduler.ordering import create_order
from rescheduler.routing import create_policy
from rescheduler.simulator.config.simulation_config import (
    ArrivalsConfig,
    SimulationConfig,
    SLOConfig,
)
from rescheduler.simulator.forecasts.forecast_sources import create_forecast
from rescheduler.simulator.results.metrics import half_interval, run_metrics, summarise
from rescheduler.simulator.simulation import RunSetup, run
from rescheduler.simulator.workloads.trace import ResampledTrace
from rescheduler.step_time.step_time import StepTime

Clock = Literal["barrier", "independent"]

ROUTERS = ("vllm", "jsq", "jsq_load", "bfio", "fast_phi")
"""Policies that are compared."""

SIGMAS = (0.25, 0.5, 1.0, 2.0)
BINS = (6, 4, 2)
ORDER_LOAD = 1.2
"""Of the capacity: who goes first matters where somebody waits."""

_IDLE_LOAD = 0.25
_LEAST_REQUESTS = 2_000
_ORACLE = {"name": "oracle"}
_KAPLAN_MEIER = {"name": "kaplan_meier"}
_AS_THEY_COME = {"name": "fcfs"}


Knowledge = Literal["counts", "loads", "ages", "forecasts", "truth"]


class Case(NamedTuple):
    """A router, an order of service, and what they know.

    Attributes:
        key: in results.
        title: in text and figures.
        knows: counts, loads, ages (Kaplan-Meier, no model), forecasts or truth.
        policy: name of the routing policy.
        options: of the policy.
        forecast: {name, ...} of its source of forecasts.
        order: {name, ...} of the order of service.
    """

    key: str
    title: str
    knows: Knowledge
    policy: str
    options: dict[str, Any]
    forecast: dict[str, Any]
    order: dict[str, Any] = _AS_THEY_COME

    @property
    def configured(self) -> str:
        """The policy as a configuration names it."""
        options = ", ".join(f"{name} {value}" for name, value in self.options.items())
        return f"{self.policy} ({options})" if options else self.policy


class Scenario(NamedTuple):
    """A cluster under a load.

    Attributes:
        clock: of the instances.
        load: mean rate of arrivals / estimated capacity; None is always overloaded.
        scale: multiplies the trace's rate to that end.
        recorded: the trace's rate is as it was recorded.
        capacity: requests per second that the cluster was estimated to finish.
        at_random: requests come at random at that part of the capacity, not as in the trace.
    """

    clock: Clock
    load: float | None
    scale: float
    recorded: bool
    capacity: float
    at_random: bool = False

    @property
    def key(self) -> str:
        """Name in results."""
        return f"{self.clock}, {self._load_title}"

    @property
    def title(self) -> str:
        """Name in text."""
        clock = {
            "barrier": "with expert parallelism (one barrier a step)",
            "independent": "as independent replicas",
        }[self.clock]
        return f"{clock}, {self._load_title}"

    @property
    def _load_title(self) -> str:
        if self.load is None:
            return "overloaded"
        how = "as recorded" if self.recorded else "scaled"
        return f"{how} ({self.load:.{0 if self.load >= 0.095 else 1}%} of capacity)"


def _noisy(sigma: float) -> dict[str, Any]:
    return {"name": "noisy", "sigma": sigma, "interval": MEASURED_INTERVAL}


def ladder(sigma: float) -> list[Case]:
    """Return the routers from knowing the least to knowing the most."""
    now, ahead = {"horizon": 0}, dict[str, Any]()
    return [
        Case("vllm", "vllm", "counts", "vllm", {}, _ORACLE),
        Case("jsq", "jsq", "counts", "jsq", {}, _ORACLE),
        Case("jsq_load", "jsq_load", "loads", "jsq_load", {}, _ORACLE),
        Case("bfio_now", "bfio without lookahead", "loads", "bfio", now, _ORACLE),
        Case("fast_phi_km", "fast_phi, Kaplan-Meier", "ages", "fast_phi", {}, _KAPLAN_MEIER),
        Case("bfio_km", "bfio, Kaplan-Meier", "ages", "bfio", ahead, _KAPLAN_MEIER),
        Case("bfio_measured", "bfio, real forecasts", "forecasts", "bfio", ahead, _noisy(sigma)),
        Case("bfio_oracle", "bfio, true lengths", "truth", "bfio", ahead, _ORACLE),
    ]


def quality_cases(longest: int) -> list[Case]:
    """Return bfio with forecasts from nearly right to useless; the oracle is in `ladder`."""
    tried = {f"σ {sigma:g}": _noisy(sigma) for sigma in SIGMAS}
    tried |= {f"{n} bins": {"name": "binned", "bins": n, "context": longest} for n in BINS}
    return [Case(title, title, "forecasts", "bfio", {}, tried[title]) for title in tried]


def order_cases(sigma: float, own_past: bool = False) -> list[Case]:
    """Return orders of service from knowing nothing to knowing the truth.

    Args:
        sigma: spread of forecasts of real quality.
        own_past: whether the trace tells clients or prefixes, by which earlier requests forecast.
    """
    boosts: dict[str, tuple[Knowledge, dict[str, Any]]] = {
        "past_lengths": ("ages", _KAPLAN_MEIER),
        **({"own_past": ("ages", {"name": "past"})} if own_past else {}),
        "real_forecasts": ("forecasts", _noisy(sigma)),
        "true_lengths": ("truth", _ORACLE),
    }
    return [Case("fcfs", "fcfs", "loads", "jsq_load", {}, {"name": "none"})] + [
        Case(key, key, knows, "jsq_load", {}, forecast, {"name": "boost"})
        for key, (knows, forecast) in boosts.items()
    ]


SCALES = (0.3, 0.1, 0.03)


def frontier_cases(case: Case) -> list[Case]:
    """Return orders that trade the tail of the latency for its mean, from `boost` to `shortest`."""
    orders: list[dict[str, Any]] = [
        *({"name": "boost", "scale": scale} for scale in SCALES),
        {"name": "shortest"},
    ]
    return [case._replace(key=f"{case.key}, {order_words(one)}", order=one) for one in orders]


def order_words(order: Mapping[str, Any]) -> str:
    """Return an order as a configuration names it."""
    return "{" + ", ".join(f"{key}: {value}" for key, value in order.items()) + "}"


def capacity(
    config: SimulationConfig, trace: ResampledTrace, step_time: StepTime, clock: Clock
) -> float:
    """Return the requests per second that a cluster with jsq_load finishes when overloaded.

    Raises:
        ValueError: none ends in a run of so few requests.
    """
    overloaded = Scenario(clock, None, 1.0, False, math.nan)
    case = next(case for case in ladder(0.0) if case.key == "jsq_load")
    figures = case_figures(overloaded, case, 0, config, trace, step_time)
    if "throughput" not in figures:
        places = config.cluster.instances * config.cluster.slots
        raise ValueError(
            f"requests: a run of {trace.requests} is too short for {places} slots: none has ended "
            f"when all are full; give at least {places}"
        )
    return figures["throughput"] / float(trace.recorded.output.mean())


def scenarios(
    capacities: Mapping[Clock, float], trace: ResampledTrace, load: float | None
) -> list[Scenario]:
    """Return the clusters and loads to judge.

    These are the trace's own rate, if the cluster keeps up with it, and always the overloaded
    cluster, where routing can gain the most.

    Args:
        capacities: of a cluster with each clock, in requests per second.
        trace: whose requests they serve.
        load: scale the arrivals to this part of the capacity.
    """
    found = []
    for clock, most in capacities.items():
        if trace.has_arrivals and 0 < trace.rate < math.inf:
            wanted = trace.rate / most if load is None else load
            scale = 1.0 if load is None else load * most / trace.rate
            if load is not None or wanted <= 1:
                found.append(Scenario(clock, wanted, scale, load is None, most))
        found.append(Scenario(clock, None, 1.0, False, most))
    return found


def case_figures(
    scenario: Scenario,
    case: Case,
    seed: int,
    config: SimulationConfig,
    trace: ResampledTrace,
    step_time: StepTime,
) -> dict[str, float]:
    """Simulate one case with one seed; return its figures, see `run_metrics`.

    An overloaded run ends before its requests do, after the steps in which full instances would
    generate the tokens of ``trace.requests``, so that none of them runs empty. Below a quarter of
    the capacity fewer requests are simulated, 2,000 at least: a nearly idle cluster takes a long
    time to serve many, and its routers hardly differ. ``requests`` counts those that finished.
    """
    cluster = config.cluster
    places = cluster.instances * cluster.slots
    if scenario.load is None:
        tokens = trace.requests * float(trace.recorded.output.mean())
        arrivals = ArrivalsConfig("revelation")
        # Not all of a sample is as short as its mean: enough requests for any.
        trace = replace(trace, requests=2 * (trace.requests + places + config.pool_limit))
        every_step = places if scenario.clock == "barrier" else cluster.slots
        max_steps = max(int(tokens / every_step), 1)
    else:
        arrivals, max_steps = ArrivalsConfig("trace", scale=scenario.scale), None
        if scenario.at_random:
            arrivals = ArrivalsConfig("poisson", rate=scenario.load * scenario.capacity)
        fewer = int(trace.requests * scenario.load / _IDLE_LOAD)
        least = min(trace.requests, _LEAST_REQUESTS)
        trace = replace(trace, requests=max(min(trace.requests, fewer), least))
    setup = RunSetup(
        config=replace(config, clock=scenario.clock, arrivals=arrivals, max_steps=max_steps),
        trace=trace,
        forecast=create_forecast(**case.forecast),
        step_time=step_time,
    )
    policy, order = create_policy(case.policy, **case.options), create_order(**case.order)
    result = run(setup, policy, seed, case.key, order=order)
    return run_metrics(result, config.slo) | {"requests": float(len(result.requests.number))}


WORTH = 0.01
"""Least relative gain for which a more demanding router is recommended."""

BySeed = Mapping[int, Mapping[str, float]]
"""Seed -> figures of the run, all of one case."""

Runs = Mapping[str, BySeed]
"""Case's key -> its runs, all of one scenario."""

_LESS_IS_BETTER = {"latency", "latency_p99"}


class Gain(NamedTuple):
    """How much better one case is than another; above 0 is better.

    Attributes:
        mean: relative, over seeds.
        half: half the width of its 95% confidence interval; NaN for a single seed.
        seeds: that both routers were run with.
    """

    mean: float
    half: float
    seeds: int

    @property
    def measurable(self) -> bool:
        """Whether 0 is outside the interval, on either side."""
        return abs(self.mean) > self.half

    @property
    def better(self) -> bool:
        """Whether it is measurably better."""
        return self.mean > self.half

    @property
    def pays(self) -> bool:
        """Whether it is measurably better, and by no trifle."""
        return self.better and self.mean >= WORTH

    @property
    def plain(self) -> dict[str, Any]:
        """Its values as JSON takes them."""
        half = self.half if self.seeds > 1 else None
        return {"mean": self.mean, "ci95": half, "seeds": self.seeds, "measurable": self.measurable}


def gain(runs: BySeed, base: BySeed, figure: str) -> Gain:
    r"""Return the gain over a base, paired by seed: both routers serve the same requests.

    .. math:: \bar x \pm t_{0.975,\,n-1}\, s / \sqrt n, \qquad
              x_i = \pm\Big(\frac{f_i}{f^{base}_i} - 1\Big)

    with minus for figures of which less is better. Goodput can be 0, and is related to the
    requests finished per second instead.

    Raises:
        ValueError: the two have no seed in common.
    """
    seeds = sorted(runs.keys() & base.keys())
    if not seeds:
        raise ValueError("nothing to compare: no seed was run with both")
    related = "requests_per_s" if figure == "goodput" else figure
    values = np.array(
        [(runs[s][figure] - base[s][figure]) / max(base[s][related], 1e-300) for s in seeds]
    )
    if figure in _LESS_IS_BETTER:
        values = -values
    half = float(half_interval(values)) if len(seeds) > 1 else math.nan
    return Gain(float(values.mean()), half, len(seeds))


class Judgement:
    """The verdict on a scenario.

    The choice begins with the first router, and goes on to one that needs to know more only if
    that is measurably better than the chosen one, by `WORTH` at least; one that looks ahead must
    be so against the best router without lookahead too. One that knows the truth is never chosen.

    With arrivals in time every router finishes what arrives, so throughput says nothing there; an
    overloaded cluster's requests arrive when there is room for them, and latency does not.

    Attributes:
        scenario: which.
        runs: of its cases.
        figure: that is judged: throughput when overloaded, else goodput or mean latency.
        today: the count-based router that everything is compared with.
        over_today: gain over ``today`` of every router, by its key.
        blind: the best router without lookahead.
        loads: the best router by loads.
        ages: the best that looks ahead with Kaplan-Meier given age.
        by_load: gain of ``loads`` over ``today``.
        ahead: gain over ``blind`` of each router that looks ahead, by its key.
        choice: the recommended router.
    """

    def __init__(
        self, scenario: Scenario, cases: Sequence[Case], runs: Runs, slo: SLOConfig | None
    ) -> None:
        self.scenario = scenario
        self.runs = runs
        served = "latency" if slo is None else "goodput"
        self.figure = "throughput" if scenario.load is None else served
        self.today = self.choice = cases[0]
        self.over_today = {case.key: self._gain(case, self.today) for case in cases}

        def best(*knowledge: str) -> Case:
            known = [case for case in cases if case.knows in knowledge]
            return max(known, key=lambda case: self.over_today[case.key].mean)

        self.blind = best("counts", "loads")
        self.loads = best("loads")
        self.ages = best("ages")
        self.by_load = self.over_today[self.loads.key]
        self.ahead = {
            case.key: self._gain(case, self.blind)
            for case in cases
            if case.knows in ("ages", "forecasts", "truth")
        }
        for case in cases[1:]:
            if case.knows == "truth" or (case.key in self.ahead and not self.ahead[case.key].pays):
                continue
            if self._gain(case, self.choice).pays:
                self.choice = case

    def _gain(self, case: Case, base: Case) -> Gain:
        return gain(self.runs[case.key], self.runs[base.key], self.figure)

    def mean_of(self, figure: str) -> float:
        """Return the mean of a figure over the runs of the best router without lookahead."""
        return float(np.mean([run[figure] for run in self.runs[self.blind.key].values()]))

    @property
    def plain(self) -> dict[str, Any]:
        """Its values as JSON takes them, with the figures of all routers."""
        base = self.runs[self.today.key]
        return {
            "clock": self.scenario.clock,
            "load": self.scenario.load,
            "rate_scale": self.scenario.scale,
            "capacity_requests_per_s": self.scenario.capacity,
            "judged_by": self.figure,
            "compared_with": self.today.key,
            "best_without_lookahead": self.blind.key,
            "lookahead_gain": _plain(self.ahead),
            "recommended": self.choice.key,
            "recommended_policy": {"name": self.choice.policy} | self.choice.options,
            "routers": {
                key: {
                    "gain": gain(runs, base, self.figure).plain,
                    **summarise([dict(run) for run in runs.values()]).plain,
                }
                for key, runs in self.runs.items()
            },
        }


class Quality:
    """Gains of bfio over the best router without lookahead, by the quality of its forecasts.

    Attributes:
        judgement: of the scenario that they were simulated in.
        gains: title of the forecast -> gain; "σ 0" is the truth, "real" the measured quality.
        sigma: spread of forecasts of that quality.
        lasts: largest σ up to which all gains are measurable; None if not even the truth's is.
    """

    def __init__(self, judgement: Judgement, titles: Sequence[str], sigma: float) -> None:
        """Judge titles of forecasts from good to bad, "σ 0.25" and so on, and of others."""
        self.judgement = judgement
        self.sigma = sigma
        self.lasts: float | None = None
        runs, blind, figure = judgement.runs, judgement.blind.key, judgement.figure
        self.gains = {"σ 0": judgement.ahead["bfio_oracle"]}
        self.gains |= {
            title: gain(runs[title], runs[blind], figure) for title in titles if title in runs
        }
        for noise, value in self.noisy.items():
            if not value.better:
                break
            self.lasts = noise
        self.gains["real"] = judgement.ahead["bfio_measured"]

    @property
    def noisy(self) -> dict[float, Gain]:
        """Gains by the spread of the forecasts' error."""
        spread = {t: float(t.split()[1]) for t in self.gains if t.startswith("σ")}
        return {spread[title]: self.gains[title] for title in spread}

    @property
    def plain(self) -> dict[str, Any]:
        """Its values as JSON takes them."""
        return {
            "scenario": self.judgement.scenario.key,
            "judged_by": self.judgement.figure,
            "compared_with": self.judgement.blind.key,
            "real_sigma": self.sigma,
            "measurable_up_to_sigma": self.lasts,
            "gains": _plain(self.gains),
        }


class OrderGains:
    """Gains of boosts over the order of arrival, by what they know.

    Attributes:
        clock: of the instances.
        latency: key of the case → gain in mean latency.
        tail: key of the case → gain in P99 latency.
        pays: key of the case that is recommended; None where none gains measurably. One that needs
            forecasts must gain more than one that does not.
    """

    def __init__(self, clock: Clock, cases: Sequence[Case], runs: Runs) -> None:
        self.clock = clock
        self.pays: str | None = None
        base, *others = (case.key for case in cases)
        self.latency, self.tail = (
            {key: gain(runs[key], runs[base], figure) for key in others}
            for figure in ("latency", "latency_p99")
        )
        for key in others[:-1]:
            if gain(runs[key], runs[self.pays or base], "latency").pays:
                self.pays = key

    @property
    def promising(self) -> str:
        """What is recommended; where nothing is, what gained most without the true lengths."""
        known = list(self.latency)[:-1]
        return self.pays or max(known, key=lambda key: self.latency[key].mean)

    @property
    def plain(self) -> dict[str, Any]:
        """Its values as JSON takes them."""
        return {
            "clock": self.clock,
            "load": ORDER_LOAD,
            "recommended": self.pays,
            "latency_gain": _plain(self.latency),
            "latency_p99_gain": _plain(self.tail),
        }


class Traded(NamedTuple):
    """An order of service, and its gains over the order of arrival.

    Attributes:
        order: {name, ...}.
        mean: gain in mean latency.
        tail: gain in P99 latency.
    """

    order: dict[str, Any]
    mean: Gain
    tail: Gain


class Frontier:
    """Orders from `boost` to `shortest`: each has a shorter mean, and a longer tail.

    Attributes:
        knows: key of the case that they are of.
        points: the orders with their gains.
        tail: P99 latency that is accepted, relative to that of the order of arrival.
        chosen: order with the shortest mean that keeps to it; None where none gains measurably.
    """

    def __init__(
        self, knows: str, cases: Sequence[Case], base: BySeed, runs: Runs, tail: float
    ) -> None:
        self.knows, self.tail = knows, tail
        self.points = [
            Traded(
                case.order,
                gain(runs[case.key], base, "latency"),
                gain(runs[case.key], base, "latency_p99"),
            )
            for case in cases
        ]
        kept = [one for one in self.points if one.mean.pays and 1.0 - one.tail.mean <= tail]
        best = max(kept, key=lambda one: one.mean.mean, default=None)
        self.chosen = None if best is None else best.order

    @property
    def plain(self) -> dict[str, Any]:
        """Its values as JSON takes them."""
        return {
            "knows": self.knows,
            "tail": self.tail,
            "chosen": self.chosen,
            "points": [
                {
                    "order": one.order,
                    "latency_gain": one.mean.plain,
                    "latency_p99_gain": one.tail.plain,
                }
                for one in self.points
            ],
        }


def _plain(gains: Mapping[str, Gain]) -> dict[str, Any]:
    return {key: value.plain for key, value in gains.items()}
