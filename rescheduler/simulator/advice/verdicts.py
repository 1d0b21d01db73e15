"""What a trace's simulations say of routers, orders and forecasts: gains, intervals, a choice."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from rescheduler.ordering import create_order
from rescheduler.routing import create_policy
from rescheduler.simulator.config.simulation_config import (
    ArrivalsConfig,
    SimulationConfig,
    SLOConfig,
)
from rescheduler.simulator.forecasts.forecast_sources import create_forecast
from rescheduler.simulator.results.metrics import half_interval, run_metrics
from rescheduler.simulator.simulation import RunSetup, run
from rescheduler.simulator.workloads.forecast_recording import MEASURED_INTERVAL
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


def ladder(sigma: float) -> list[Case]:
    """Return the routers from knowing the least to knowing the most."""
    now, ahead = {"horizon": 0}, dict[str, Any]()
    noisy = {"name": "noisy", "sigma": sigma, "interval": MEASURED_INTERVAL}
    return [
        Case("vllm", "vllm", "counts", "vllm", {}, _ORACLE),
        Case("jsq", "jsq", "counts", "jsq", {}, _ORACLE),
        Case("jsq_load", "jsq_load", "loads", "jsq_load", {}, _ORACLE),
        Case("bfio_now", "bfio without lookahead", "loads", "bfio", now, _ORACLE),
        Case("fast_phi_km", "fast_phi, Kaplan-Meier", "ages", "fast_phi", {}, _KAPLAN_MEIER),
        Case("bfio_km", "bfio, Kaplan-Meier", "ages", "bfio", ahead, _KAPLAN_MEIER),
        Case("bfio_measured", "bfio, real forecasts", "forecasts", "bfio", ahead, noisy),
        Case("bfio_oracle", "bfio, true lengths", "truth", "bfio", ahead, _ORACLE),
    ]


def quality_cases(longest: int) -> list[Case]:
    """Return bfio with forecasts from nearly right to useless; the oracle is in `ladder`."""
    noise: list[tuple[str, dict[str, Any]]] = [
        (f"σ {sigma:g}", {"name": "noisy", "sigma": sigma, "interval": MEASURED_INTERVAL})
        for sigma in SIGMAS
    ]
    bins: list[tuple[str, dict[str, Any]]] = [
        (f"{n} bins", {"name": "binned", "bins": n, "context": longest}) for n in BINS
    ]
    return [
        Case(title, title, "forecasts", "bfio", {}, forecast) for title, forecast in noise + bins
    ]


def order_cases(sigma: float, own_past: bool = False) -> list[Case]:
    """Return orders of service from knowing nothing to knowing the truth.

    Args:
        sigma: spread of forecasts of real quality.
        own_past: whether the trace tells clients or prefixes, by which earlier requests forecast.
    """
    boost = {"name": "boost"}
    noisy = {"name": "noisy", "sigma": sigma, "interval": MEASURED_INTERVAL}

    def case(
        key: str, knows: Knowledge, forecast: dict[str, Any], order: dict[str, Any] = boost
    ) -> Case:
        return Case(key, key, knows, "jsq_load", {}, forecast, order)

    return [
        case("fcfs", "loads", {"name": "none"}, _AS_THEY_COME),
        case("past_lengths", "ages", _KAPLAN_MEIER),
        *([case("own_past", "ages", {"name": "past"})] if own_past else []),
        case("real_forecasts", "forecasts", noisy),
        case("true_lengths", "truth", _ORACLE),
    ]


def capacity(
    config: SimulationConfig, trace: ResampledTrace, step_time: StepTime, clock: Clock
) -> float:
    """Return the requests per second that a cluster with jsq_load finishes when overloaded.

    Raises:
        ValueError: none ends in a run of so few requests.
    """
    overloaded = Scenario(clock, None, 1.0, False, math.nan)
    case = next(case for case in ladder(0.0) if case.key == "jsq_load")
    mean_output = float(trace.recorded.output.mean())
    figures = case_figures(overloaded, case, 0, config, trace, step_time)
    if "throughput" not in figures:
        places = config.cluster.instances * config.cluster.slots
        raise ValueError(
            f"requests: a run of {trace.requests} is too short for {places} slots: none has ended "
            f"when all are full; give at least {places}"
        )
    return figures["throughput"] / mean_output


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

Runs = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Case's key -> seed -> figures of the run, all of one scenario."""

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


class Judgement(NamedTuple):
    """One scenario's verdict.

    Attributes:
        scenario: which.
        figure: that is judged, see `judged_figure`.
        today: the count-based router that everything is compared with.
        blind: the best router without lookahead.
        loads: the best router by loads.
        ages: the best that looks ahead with Kaplan-Meier given age.
        by_load: gain of ``loads`` over ``today``.
        ahead: gain over ``blind`` of each router that looks ahead, by its key.
        choice: the recommended router, see `judge`.
        wait_p95: seconds that 95% of the requests wait less than, with ``blind``.
        step: seconds a token takes there on average.
    """

    scenario: Scenario
    figure: str
    today: Case
    blind: Case
    loads: Case
    ages: Case
    by_load: Gain
    ahead: dict[str, Gain]
    choice: Case
    wait_p95: float
    step: float


class Quality(NamedTuple):
    """Gains of bfio over the best router without lookahead, by the quality of its forecasts.

    Attributes:
        scenario: that they were simulated in.
        figure: that is judged.
        blind: the router compared with.
        gains: title of the forecast -> gain; "σ 0" is the truth.
        sigma: spread of real forecasts, whose gain is under the title "real".
        lasts: largest σ up to which all gains are measurable; None if not even the truth's is.
    """

    scenario: Scenario
    figure: str
    blind: Case
    gains: dict[str, Gain]
    sigma: float
    lasts: float | None


class OrderGains(NamedTuple):
    """Gains of boosts over the order of arrival, by what they know.

    Attributes:
        clock: of the instances.
        latency: key of the case → gain in mean latency.
        tail: key of the case → gain in P99 latency.
        pays: key of the case that is recommended; None where none gains measurably.
    """

    clock: Clock
    latency: dict[str, Gain]
    tail: dict[str, Gain]
    pays: str | None


def judged_figure(scenario: Scenario, slo: SLOConfig | None) -> str:
    """Return what is to be gained: throughput when overloaded, else goodput or mean latency.

    With arrivals in time every router finishes what arrives, so that throughput says nothing; an
    overloaded cluster's requests arrive when there is room for them, so that latency does not.
    """
    if scenario.load is None:
        return "throughput"
    return "latency" if slo is None else "goodput"


def gain(
    runs: Mapping[int, Mapping[str, float]], base: Mapping[int, Mapping[str, float]], figure: str
) -> Gain:
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


def judge(
    scenario: Scenario, cases: Sequence[Case], runs: Runs, slo: SLOConfig | None
) -> Judgement:
    """Return what the runs of one scenario say.

    The choice begins with the first router, and goes on to one that needs to know more only if
    that is measurably better than the chosen one, by `WORTH` at least; one that looks ahead must
    be so against the best router without lookahead too. One that knows the truth is never chosen.
    """
    figure = judged_figure(scenario, slo)
    today = choice = cases[0]
    over_today = {case.key: gain(runs[case.key], runs[today.key], figure) for case in cases}

    def best(*knowledge: str) -> Case:
        return max(
            (case for case in cases if case.knows in knowledge),
            key=lambda case: over_today[case.key].mean,
        )

    blind = best("counts", "loads")
    ahead = {
        case.key: gain(runs[case.key], runs[blind.key], figure)
        for case in cases
        if case.knows in ("ages", "forecasts", "truth")
    }
    for case in cases[1:]:
        if case.knows == "truth" or (case.key in ahead and not ahead[case.key].pays):
            continue
        if gain(runs[case.key], runs[choice.key], figure).pays:
            choice = case
    loads = best("loads")
    served = list(runs[blind.key].values())
    return Judgement(
        scenario=scenario,
        figure=figure,
        today=today,
        blind=blind,
        loads=loads,
        ages=best("ages"),
        by_load=over_today[loads.key],
        ahead=ahead,
        choice=choice,
        wait_p95=float(np.mean([run["wait_p95"] for run in served])),
        step=float(np.mean([run["tpot"] for run in served])),
    )


def judge_quality(judgement: Judgement, titles: Sequence[str], runs: Runs, sigma: float) -> Quality:
    """Return how good forecasts must be in the scenario of a judgement.

    Args:
        judgement: of the scenario.
        titles: of forecasts from good to bad, "σ 0.25" and so on, and of others.
        runs: of each title, of the ladder's "bfio_oracle" and "bfio_measured", and of the base.
        sigma: of "bfio_measured".
    """
    base, figure = runs[judgement.blind.key], judgement.figure
    gains = {"σ 0": judgement.ahead["bfio_oracle"]}
    gains |= {title: gain(runs[title], base, figure) for title in titles if title in runs}
    lasts = None
    for title, value in gains.items():
        if not title.startswith("σ"):
            continue
        if not value.better:
            break
        lasts = float(title.split()[1])
    gains["real"] = judgement.ahead["bfio_measured"]
    return Quality(judgement.scenario, figure, judgement.blind, gains, sigma, lasts)


def order_gains(clock: Clock, cases: Sequence[Case], runs: Runs) -> OrderGains:
    """Return what the runs say; one that needs forecasts must gain more than one that does not."""
    base, others = cases[0].key, [case.key for case in cases[1:]]
    latency, tail = (
        {key: gain(runs[key], runs[base], figure) for key in others}
        for figure in ("latency", "latency_p99")
    )
    pays = None
    for key in others[:-1]:
        if gain(runs[key], runs[pays or base], "latency").pays:
            pays = key
    return OrderGains(clock, latency, tail, pays)
