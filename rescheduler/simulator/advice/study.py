"""The simulations behind `headway advise`: run on all cores, kept by scenario, router and seed."""

import os
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rescheduler.simulator.advice.orders import (
    LOAD,
    OrderCase,
    OrderGains,
    order_cases,
    order_figures,
    order_gains,
)
from rescheduler.simulator.advice.verdicts import (
    Case,
    Clock,
    Gain,
    Judgement,
    Quality,
    Scenario,
    capacity,
    case_figures,
    gain,
    judge,
    judge_quality,
    ladder,
    quality_cases,
    scenarios,
)
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.experiments.workers import gather, run_in_threads
from rescheduler.simulator.results.metrics import summarise
from rescheduler.simulator.workloads.trace import ResampledTrace
from rescheduler.step_time.step_time import StepTime

_MOST_WORKERS = 8


class _Job(NamedTuple):
    scenario: Scenario
    case: Case
    seed: int


class Study:
    """All runs of one advice, and what they say.

    Args:
        config: cluster, seeds, objectives; clock and arrivals are each scenario's.
        trace: of the requests, as many as each run simulates.
        step_time: seconds of a step.
        sigma: spread of forecasts of real quality.

    Attributes:
        capacities: requests per second, by clock.
        cases: routers in order of what they need to know.
    """

    def __init__(
        self, config: SimulationConfig, trace: ResampledTrace, step_time: StepTime, sigma: float
    ) -> None:
        self.capacities: dict[Clock, float] = {}
        self.cases: list[Case] = []
        self._config = config
        self._trace = trace
        self._step_time = step_time
        self._sigma = sigma
        self._scenarios: list[Scenario] = []
        self._runs: dict[str, dict[str, dict[int, dict[str, float]]]] = {}
        self._ordered: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)

    def simulate(self, clocks: Sequence[Clock], load: float | None) -> bool:
        """Run everything, one seed after the other; return whether Ctrl-C ended that.

        The quality of forecasts is varied in the scenario where the truth gains most; if it gains
        measurably in none, behind the barrier of an overloaded cluster.
        """
        if gather(self._pilots(clocks), len(clocks), lambda clock, found: None, str):
            return True
        if self._run_orders(clocks[-1]):
            return True
        self.cases = ladder(self._sigma)
        self._scenarios = scenarios(self.capacities, self._trace, load)
        if self._run_all("routers", self._scenarios, self.cases):
            return True
        tried = self._quality_scenario(self.judgements())
        return self._run_all("quality of forecasts", [tried], self._quality_cases())

    def order(self) -> OrderGains | None:
        """Return what an order of service gains, if all of that was simulated."""
        cases = order_cases(self._sigma)
        if not all(self._ordered.get(case.key) for case in cases):
            return None
        return order_gains(list(self.capacities)[-1], cases, self._ordered)

    def judgements(self) -> list[Judgement]:
        """Return the verdict on every scenario in which each router has a run."""
        return [
            judge(scenario, self.cases, self._runs[scenario.key], self._config.slo)
            for scenario in self._scenarios
            if all(self._runs.get(scenario.key, {}).get(case.key) for case in self.cases)
        ]

    def quality(self, judged: Sequence[Judgement]) -> Quality | None:
        """Return how good forecasts must be, if that was simulated."""
        scenario = self._quality_scenario(judged)
        runs = self._runs[scenario.key]
        titles = [case.key for case in self._quality_cases() if case.key in runs]
        if not titles:
            return None
        judgement = next(j for j in judged if j.scenario is scenario)
        return judge_quality(judgement, titles, runs, self._sigma)

    def gains(self, judged: Sequence[Judgement]) -> dict[str, dict[str, Gain]]:
        """Return the gains over the first router, by scenario and router."""
        gains: dict[str, dict[str, Gain]] = {}
        for judgement in judged:
            runs = self._runs[judgement.scenario.key]
            base = runs[judgement.today.key]
            gains[judgement.scenario.key] = {
                case.key: gain(runs[case.key], base, judgement.figure) for case in self.cases
            }
        return gains

    def document(self, judged: Sequence[Judgement], quality: Quality | None) -> dict[str, Any]:
        """Return all figures and verdicts, as JSON takes them."""
        return {
            "order": _order_document(self.order()),
            "scenarios": {j.scenario.key: self._scenario_document(j) for j in judged},
            "quality": None if quality is None else _quality_document(quality),
        }

    def _scenario_document(self, judgement: Judgement) -> dict[str, Any]:
        scenario, runs = judgement.scenario, self._runs[judgement.scenario.key]
        base = runs[judgement.today.key]
        routers = {}
        for key, by_seed in runs.items():
            over_today = gain(by_seed, base, judgement.figure)
            routers[key] = {
                "gain": _gain_document(over_today),
                **summarise(list(by_seed.values())).plain,
            }
        return {
            "clock": scenario.clock,
            "load": scenario.load,
            "rate_scale": scenario.scale,
            "capacity_requests_per_s": scenario.capacity,
            "judged_by": judgement.figure,
            "compared_with": judgement.today.key,
            "best_without_lookahead": judgement.blind.key,
            "lookahead_gain": {k: _gain_document(g) for k, g in judgement.ahead.items()},
            "recommended": judgement.choice.key,
            "recommended_policy": {"name": judgement.choice.policy} | judgement.choice.options,
            "routers": routers,
        }

    def _quality_scenario(self, judged: Sequence[Judgement]) -> Scenario:
        def gained(judgement: Judgement) -> tuple[bool, bool, bool, float]:
            truth, scenario = judgement.ahead["bfio_oracle"], judgement.scenario
            return truth.better, scenario.clock == "barrier", scenario.load is None, truth.mean

        return max(judged, key=gained).scenario

    def _quality_cases(self) -> list[Case]:
        return quality_cases(int(self._trace.recorded.output.max()))

    def _pilots(self, clocks: Sequence[Clock]) -> Generator[tuple[str, None], None, None]:
        """Estimate the capacity with each clock."""
        config, trace, step_time = self._config, self._trace, self._step_time
        for clock in clocks:
            self.capacities[clock] = capacity(config, trace, step_time, clock)
            yield f"capacity, {clock}", None

    def _run_orders(self, clock: Clock) -> bool:
        """Run the orders of service with one seed after the other."""
        config = replace(self._config, clock=clock)
        rate = LOAD * self.capacities[clock]
        jobs = [(case, i) for i in range(config.seeds) for case in order_cases(self._sigma)]

        def simulated(job: tuple[OrderCase, int]) -> dict[str, float]:
            return order_figures(*job, config, self._trace, self._step_time, rate)

        def keep(job: tuple[OrderCase, int], figures: dict[str, float]) -> None:
            self._ordered[job[0].key][job[1]] = figures

        outcomes = run_in_threads(jobs, simulated, _workers())
        return gather(outcomes, len(jobs), keep, lambda job: "orders of service")

    def _run_all(self, title: str, tried: Sequence[Scenario], cases: Sequence[Case]) -> bool:
        """Run cases with one seed after the other; return whether Ctrl-C ended that."""
        seeds = range(self._config.seeds)
        jobs = [_Job(scenario, case, i) for i in seeds for scenario in tried for case in cases]
        outcomes = run_in_threads(jobs, self._figures, _workers())
        return gather(outcomes, len(jobs), self._keep, lambda job: title)

    def _figures(self, job: _Job) -> dict[str, float]:
        return case_figures(
            job.scenario, job.case, job.seed, self._config, self._trace, self._step_time
        )

    def _keep(self, job: _Job, figures: dict[str, float]) -> None:
        by_case = self._runs.setdefault(job.scenario.key, defaultdict(dict))
        by_case[job.case.key][job.seed] = figures


def _workers() -> int:
    return min(os.cpu_count() or 1, _MOST_WORKERS)


def _order_document(gains: OrderGains | None) -> dict[str, Any] | None:
    if gains is None:
        return None
    return {
        "clock": gains.clock,
        "load": LOAD,
        "recommended": gains.pays,
        "latency_gain": {key: _gain_document(value) for key, value in gains.latency.items()},
        "latency_p99_gain": {key: _gain_document(value) for key, value in gains.tail.items()},
    }


def _gain_document(value: Gain) -> dict[str, Any]:
    half = value.half if value.seeds > 1 else None
    return {"mean": value.mean, "ci95": half, "seeds": value.seeds, "measurable": value.measurable}


def _quality_document(quality: Quality) -> dict[str, Any]:
    return {
        "scenario": quality.scenario.key,
        "judged_by": quality.figure,
        "compared_with": quality.blind.key,
        "real_sigma": quality.sigma,
        "measurable_up_to_sigma": quality.lasts,
        "gains": {title: _gain_document(value) for title, value in quality.gains.items()},
    }
