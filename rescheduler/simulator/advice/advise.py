"""`headway advise`: estimate whether forecasting pays off on a trace."""

import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_collection.files import refuse_unwritable
from data_collection.workload.arrivals import TimeUnit
from predictor.forecasts.forecast_recording import MEASURED_SIGMA, error_sigma, read_recording
from rescheduler.simulator.advice.text import advice_text, draw_advice
from rescheduler.simulator.advice.verdicts import (
    ORDER_LOAD,
    ROUTERS,
    Case,
    Clock,
    Frontier,
    Judgement,
    OrderGains,
    Quality,
    Scenario,
    capacity,
    case_figures,
    frontier_cases,
    ladder,
    order_cases,
    quality_cases,
    scenarios,
)
from rescheduler.simulator.config.simulation_config import (
    ClusterConfig,
    SimulationConfig,
    SLOConfig,
)
from rescheduler.simulator.experiments.workers import (
    Figures,
    compile_notice,
    gather,
    run_in_threads,
)
from rescheduler.simulator.results.report import (
    about,
    json_text,
    refuse_foreign_folder,
    write_report,
)
from rescheduler.simulator.workloads.trace import ResampledTrace, first_requests
from rescheduler.simulator.workloads.trace_files import TraceFile
from rescheduler.simulator.workloads.trace_formats import TraceFormatName
from rescheduler.step_time.step_time import StepTime, create_step_time

_MOST_READ = 1_000_000
_REQUESTS = 20_000
_TOKENS = 20_000_000
_TURNS = 8
_MOST_LOAD = 1.2
_MOST_WORKERS = 8


def advise(
    trace: Path,
    instances: int = 16,
    slots: int = 72,
    kv_capacity: int | None = None,
    clock: Literal["both", "barrier", "independent"] = "both",
    load: float | None = None,
    step_time: dict[str, Any] | None = None,
    requests: int | None = None,
    seeds: int = 5,
    slo: SLOConfig | None = None,
    tail: float = 1.2,
    recording: Path | None = None,
    skip_empty: bool = False,
    format: TraceFormatName | None = None,
    time_unit: TimeUnit | None = None,
    json: Path | None = None,
    out: Path | None = None,
    overwrite: bool = False,
) -> int:
    """Estimate whether forecasting output lengths pays off on a trace, and recommend a router.

    First reports what serving short requests first would gain when more arrive than fit. Then
    simulates routers that count requests, that balance tokens, and that look ahead. It does so on
    the trace's own lengths and arrivals, and on an overloaded cluster. It compares the routers by
    95% intervals over seeds. Every seed draws the requests anew from the trace, in runs of
    consecutive ones that keep the gaps between them (a block bootstrap). All routers serve the
    same draw. So the intervals say how sure a gain is for traffic like this trace. Ctrl-C ends it
    early and reports what it has.

    Args:
        trace: file of requests: Azure's, BurstGPT's, Mooncake's or Headway's own columns, plain
            or gzipped. Without arrival times only the overloaded cluster is judged.
        instances: decode instances.
        slots: requests that an instance decodes at once.
        kv_capacity: Context tokens that an instance holds. If not set, any number.
        clock: barrier (expert parallelism: all instances step together), independent (replicas),
            or both.
        load: Scale arrivals to this part of the estimated capacity, at most 1.2. If not set, as
            recorded.
        step_time: {name: bfio | moe | batch | table | profile, ...options}: how long a step takes.
            If not set, bfio.
        requests: Requests simulated in a run. If not set, 20,000, or fewer that generate 20 million
            tokens, but at least 8 for each slot.
        seeds: runs of each router.
        slo: {ttft_s, tpot_s}: judge by the requests that meet these, instead of by mean latency.
        tail: P99 latency that you accept, relative to that in order of arrival. The order with the
            shortest mean latency that keeps to it is recommended.
        recording: Take the error of real forecasts from this recording, which `headway evaluate
            --forecasts` writes. If not set, from the recording of the included checkpoint.
        skip_empty: leave out requests without prompt or output tokens.
        format: headway, azure, burstgpt or mooncake; told by the first line if not set.
        time_unit: s, ms, us or ns, of the arrivals; if not set, as the format has it. If the trace
            is implausible in it you are asked.
        json: write all figures to this file.
        out: write advice.json, advice.txt and advice.png to this folder.
        overwrite: write to ``out`` whatever is in it.

    Raises:
        ValueError: a file, an option or a request that cannot be simulated.
    """
    if load is not None and not 0 < load <= _MOST_LOAD:
        raise ValueError(f"load must be above 0 and at most {_MOST_LOAD}, not {load}")
    if not tail >= 1.0:
        raise ValueError(f"tail must be at least 1, the P99 in order of arrival, not {tail:g}")
    if requests is not None and requests < 1:
        raise ValueError(f"requests must be at least 1, not {requests}")
    file = TraceFile(trace, None, skip_empty, format, time_unit, option="--time-unit")
    print(f"headway advise: {file.read_as}", file=sys.stderr)
    recorded = _recorded(trace, file, kv_capacity)
    if load is not None and not recorded.has_arrivals:
        raise ValueError(f"{trace}: no arrival times that load could scale; leave load out")
    sigma = MEASURED_SIGMA if recording is None else error_sigma(read_recording(recording))
    said = {"format": format, "time_unit": time_unit}
    config = SimulationConfig(
        cluster=ClusterConfig(instances, slots, kv_capacity, prefix_caching=True),
        step_time={"name": "bfio"} if step_time is None else step_time,
        trace={"path": str(trace)} | {name: value for name, value in said.items() if value},
        policies=list(ROUTERS),
        seeds=seeds,
        slo=slo,
    )
    timing = create_step_time(slots=slots, **config.step_time)
    if out is not None:
        refuse_foreign_folder(out, "advise", "advice.json", overwrite)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        refuse_unwritable(json)
    enough = min(_REQUESTS, int(_TOKENS / recorded.recorded.output.mean()))
    drawn = requests or max(enough, _TURNS * instances * slots)
    study = Study(config, replace(recorded, requests=drawn), timing, sigma)
    compile_notice()
    clocks: tuple[Clock, ...] = ("barrier", "independent") if clock == "both" else (clock,)
    interrupted = study.simulate(clocks, load)
    judged = study.judgements()
    if not judged:  # nothing to say yet
        raise KeyboardInterrupt
    order, quality = study.order(), study.quality(judged)
    frontier = study.frontier(tail)
    finished = min(judgement.by_load.seeds for judgement in judged)
    simulated = _described(recorded, config.cluster, drawn, finished, study.capacities, load)
    text = advice_text(simulated, order, frontier, judged, quality, sigma)
    figures = {
        "_about": about("advise", config) | {"traces": [file.read_as]},
        "advice": text.splitlines(),
        "order": None if order is None else order.plain,
        "frontier": None if frontier is None else frontier.plain,
        "scenarios": {judgement.scenario.key: judgement.plain for judgement in judged},
        "quality": None if quality is None else quality.plain,
    }
    document = json_text(figures, allow_nan=False)
    print(text)
    if out is not None:
        figure = draw_advice(judged, study.cases, quality, frontier)
        texts = {"advice.txt": text + "\n", "advice.json": document}
        write_report(out, texts, {"advice.png": figure})
    if json is not None:
        write_report(json.parent, {json.name: document}, {})
    for path in filter(None, (json, out)):
        print(f"wrote {path}")
    if interrupted:
        print("headway advise: interrupted; this is what it had", file=sys.stderr)
        return 130
    return 0


def _recorded(path: Path, trace: TraceFile, kv_capacity: int | None) -> ResampledTrace:
    """Return the trace in a file."""
    requests = first_requests(trace, np.random.default_rng(0), _MOST_READ)
    if kv_capacity is not None:
        tokens = requests.prompt + requests.output
        too_large = np.count_nonzero(tokens > kv_capacity)
        if too_large:
            raise ValueError(
                f"{path}: {too_large:,} of {len(tokens):,} requests need more than the "
                f"{kv_capacity:,} tokens that an instance holds; the largest needs {tokens.max():,}"
                f": give --kv_capacity {tokens.max()} or more, or leave it out"
            )
    return ResampledTrace(trace.name, requests, len(requests.prompt))


def _described(
    recorded: ResampledTrace,
    cluster: ClusterConfig,
    drawn: int,
    seeds: int,
    capacities: Mapping[Clock, float],
    load: float | None,
) -> list[str]:
    """Return sentences on what was simulated, and on what was left out and why."""
    requests = recorded.recorded
    sentences = [
        f"{recorded.name}: {len(requests.prompt):,} requests, "
        f"{requests.prompt.mean():,.0f} prompt and {requests.output.mean():,.0f} output tokens on "
        f"average{f', {recorded.rate:,.1f} a second' if recorded.has_arrivals else ''}.",
        f"Simulated on {cluster.instances} instances × {cluster.slots} slots, {drawn:,} requests a "
        f"run drawn from these in runs of consecutive ones, {seeds} "
        f"seed{'s' * (seeds != 1)}; ± is half a 95% interval.",
    ]
    if not recorded.has_arrivals:
        sentences.append("There are no arrival times: only an overloaded cluster is judged.")
    elif load is None:
        for clock, most in capacities.items():
            if not 0 < recorded.rate <= most:
                sentences.append(
                    f"With the {clock} clock the cluster finishes {most:,.1f} requests a second "
                    "and cannot keep up with the trace: only the overloaded cluster is judged."
                )
    return sentences


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
        self.cases: list[Case] = ladder(sigma)
        self._simulated = config, trace, step_time
        self._sigma = sigma
        self._scenarios: list[Scenario] = []
        self._runs: dict[Scenario, dict[str, dict[int, Figures]]] = {}
        recorded = trace.recorded
        own_past = bool(len(recorded.prefixes) or recorded.client.any())
        self._order_cases = order_cases(sigma, own_past)
        self._quality_cases = quality_cases(int(recorded.output.max()))

    def simulate(self, clocks: Sequence[Clock], load: float | None) -> bool:
        """Run everything, one seed after the other; return whether Ctrl-C ended that.

        The quality of forecasts is varied in the scenario where the truth gains most; if it gains
        measurably in none, behind the barrier of an overloaded cluster.
        """
        try:
            for clock in clocks:
                self.capacities[clock] = capacity(*self._simulated, clock)
        except KeyboardInterrupt:
            return True
        if self._run_all("orders of service", [self._order_scenario()], self._order_cases):
            return True
        if self._run_all("mean against tail", [self._order_scenario()], self._frontier_cases()):
            return True
        self._scenarios = scenarios(self.capacities, self._simulated[1], load)
        if self._run_all("routers", self._scenarios, self.cases):
            return True
        tried = self._quality_judgement(self.judgements()).scenario
        return self._run_all("quality of forecasts", [tried], self._quality_cases)

    def order(self) -> OrderGains | None:
        """Return what an order of service gains, if all of that was simulated."""
        scenario = self._order_scenario()
        runs = self._runs.get(scenario, {})
        if not all(runs.get(case.key) for case in self._order_cases):
            return None
        return OrderGains(scenario.clock, self._order_cases, runs)

    def _frontier_cases(self) -> list[Case]:
        order = self.order()
        if order is None:
            return []
        return frontier_cases(_named(self._order_cases, order.promising))

    def frontier(self, tail: float) -> Frontier | None:
        """Return how the mean latency and its tail trade, if all of that was simulated."""
        order, cases = self.order(), self._frontier_cases()
        runs = self._runs.get(self._order_scenario(), {}) if order is not None else {}
        if order is None or not all(runs.get(case.key) for case in cases):
            return None
        cases = [_named(self._order_cases, order.promising), *cases]
        return Frontier(order.promising, cases, runs[self._order_cases[0].key], runs, tail)

    def judgements(self) -> list[Judgement]:
        """Return the verdict on every scenario in which each router has a run."""
        return [
            Judgement(scenario, self.cases, self._runs[scenario], self._simulated[0].slo)
            for scenario in self._scenarios
            if all(self._runs.get(scenario, {}).get(case.key) for case in self.cases)
        ]

    def quality(self, judged: Sequence[Judgement]) -> Quality | None:
        """Return how good forecasts must be, if that was simulated."""
        judgement = self._quality_judgement(judged)
        titles = [case.key for case in self._quality_cases if case.key in judgement.runs]
        return Quality(judgement, titles, self._sigma) if titles else None

    def _quality_judgement(self, judged: Sequence[Judgement]) -> Judgement:
        def gained(judgement: Judgement) -> tuple[bool, bool, bool, float]:
            truth, scenario = judgement.ahead["bfio_oracle"], judgement.scenario
            return truth.better, scenario.clock == "barrier", scenario.load is None, truth.mean

        return max(judged, key=gained)

    def _order_scenario(self) -> Scenario:
        clock, most = list(self.capacities.items())[-1]
        return Scenario(clock, ORDER_LOAD, 1.0, False, most, at_random=True)

    def _run_all(self, title: str, tried: Sequence[Scenario], cases: Sequence[Case]) -> bool:
        """Run cases with one seed after the other; return whether Ctrl-C ended that."""
        seeds = range(self._simulated[0].seeds)
        jobs = [(scenario, case, i) for i in seeds for scenario in tried for case in cases]

        def figures(job: tuple[Scenario, Case, int]) -> Figures:
            return case_figures(*job, *self._simulated)

        def keep(job: tuple[Scenario, Case, int], run: Figures) -> None:
            scenario, case, seed = job
            self._runs.setdefault(scenario, defaultdict(dict))[case.key][seed] = run

        outcomes = run_in_threads(jobs, figures, min(os.cpu_count() or 1, _MOST_WORKERS))
        return gather(outcomes, len(jobs), keep, lambda job: title)


def _named(cases: Sequence[Case], key: str) -> Case:
    return next(case for case in cases if case.key == key)
