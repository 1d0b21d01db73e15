"""What `headway advise` compares: routers from counting to the truth, on a cluster and its load."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from rescheduler.routing import create_policy
from rescheduler.simulator.config.simulation_config import ArrivalsConfig, SimulationConfig
from rescheduler.simulator.engine.step_metrics import power_model
from rescheduler.simulator.forecasts.forecast_sources import create_forecast
from rescheduler.simulator.results.metrics import run_metrics
from rescheduler.simulator.run_setup import RunSetup
from rescheduler.simulator.simulation import run
from rescheduler.simulator.workloads.forecast_recording import MEASURED_INTERVAL
from rescheduler.simulator.workloads.trace import ResampledTrace
from rescheduler.step_time.step_time import StepTime

__all__ = [
    "ROUTERS",
    "Case",
    "Clock",
    "Scenario",
    "capacity",
    "case_figures",
    "ladder",
    "quality_cases",
    "scenarios",
]

Clock = Literal["barrier", "independent"]

ROUTERS = ("vllm", "jsq", "jsq_load", "bfio", "fast_phi")
"""Policies that are compared."""

SIGMAS = (0.25, 0.5, 1.0, 2.0)
BINS = (6, 4, 2)
_IDLE_LOAD = 0.25
_LEAST_REQUESTS = 2_000
_ORACLE = {"name": "oracle"}
_KAPLAN_MEIER = {"name": "kaplan_meier"}


class Case(NamedTuple):
    """A router and what it knows.

    Attributes:
        key: in results.
        title: in text and figures.
        knows: counts, loads, ages (Kaplan-Meier, no model), forecasts or truth.
        policy: name of the routing policy.
        options: of the policy.
        forecast: {name, ...} of its source of forecasts.
    """

    key: str
    title: str
    knows: Literal["counts", "loads", "ages", "forecasts", "truth"]
    policy: str
    options: dict[str, Any]
    forecast: dict[str, Any]

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
    """

    clock: Clock
    load: float | None
    scale: float
    recorded: bool
    capacity: float

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
    """Simulate one router with one seed; return its figures, see `run_metrics`.

    An overloaded run ends before its requests do, after the steps in which full instances would
    generate the tokens of ``trace.requests``, so that none of them runs empty. Below a quarter of
    the capacity fewer requests are simulated, 2,000 at least: a nearly idle cluster takes a long
    time to serve many, and its routers hardly differ. ``latency`` is the mean of end − arrival,
    and ``requests`` counts those that finished.
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
        fewer = int(trace.requests * scenario.load / _IDLE_LOAD)
        least = min(trace.requests, _LEAST_REQUESTS)
        trace = replace(trace, requests=max(min(trace.requests, fewer), least))
    setup = RunSetup(
        config=replace(config, clock=scenario.clock, arrivals=arrivals, max_steps=max_steps),
        trace=trace,
        forecast=create_forecast(**case.forecast),
        step_time=step_time,
        power=power_model(config.power),
    )
    result = run(setup, create_policy(case.policy, **case.options), seed, case.key)
    figures = run_metrics(result, config.slo)
    requests = result.requests
    figures["requests"] = float(len(requests.number))
    if len(requests.number):
        figures["latency"] = float(np.mean(requests.end - requests.arrival))
    return figures
