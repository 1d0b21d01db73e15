"""`headway advise`: estimate whether forecasting pays off on a trace."""

import os
import sys
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_collection.files import refuse_unwritable
from data_collection.workload.arrivals import TimeUnit
from rescheduler.simulator.advice.text import advice_text, draw_advice
from rescheduler.simulator.advice.verdicts import (
    ORDER_LOAD,
    ROUTERS,
    Case,
    Clock,
    Gain,
    Judgement,
    OrderGains,
    Quality,
    Scenario,
    capacity,
    case_figures,
    gain,
    judge,
    judge_quality,
    ladder,
    order_cases,
    order_gains,
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
from rescheduler.simulator.results.metrics import summarise
from rescheduler.simulator.results.report import (
    about,
    json_text,
    refuse_foreign_folder,
    write_report,
)
from rescheduler.simulator.workloads.forecast_recording import (
    MEASURED_SIGMA,
    error_sigma,
    read_recording,
)
from rescheduler.simulator.workloads.trace import ResampledTrace, first_requests
from rescheduler.simulator.workloads.trace_files import TraceFile, TraceFormatName
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
    simulates routers that count requests, that balance tokens, and that look ahead, on the
    trace's own lengths and arrivals and on an overloaded cluster, and compares them by 95%
    intervals over seeds. Every seed draws the requests anew from the trace, in runs of
    consecutive ones that keep the gaps between them (a block bootstrap), and all routers serve
    the same draw: the intervals say how sure a gain is for traffic like this trace. Ctrl-C ends
    it early and reports what it has.

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
        recording: Take the error of real forecasts from this recording (`headway record`). If not
            set, from that of the included checkpoint.
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
    quality = study.quality(judged)
    finished = min(judgement.by_load.seeds for judgement in judged)
    simulated = _described(recorded, config.cluster, drawn, finished, study.capacities, load)
    text = advice_text(simulated, study.order(), judged, quality, sigma)
    found = {
        "_about": about("advise", config) | {"traces": [file.read_as]},
        "advice": text.splitlines(),
    }
    found |= study.document(judged, quality)
    document = json_text(found, allow_nan=False)
    print(text)
    if out is not None:
        figure = draw_advice(study.gains(judged), study.cases, quality)
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
        self.cases: list[Case] = []
        self._config = config
        self._trace = trace
        self._step_time = step_time
        self._sigma = sigma
        self._scenarios: list[Scenario] = []
        self._runs: dict[Scenario, dict[str, dict[int, Figures]]] = {}

    def simulate(self, clocks: Sequence[Clock], load: float | None) -> bool:
        """Run everything, one seed after the other; return whether Ctrl-C ended that.

        The quality of forecasts is varied in the scenario where the truth gains most; if it gains
        measurably in none, behind the barrier of an overloaded cluster.
        """
        if gather(self._pilots(clocks), len(clocks), lambda clock, found: None, str):
            return True
        if self._run_all("orders of service", [self._order_scenario()], self._order_cases()):
            return True
        self.cases = ladder(self._sigma)
        self._scenarios = scenarios(self.capacities, self._trace, load)
        if self._run_all("routers", self._scenarios, self.cases):
            return True
        tried = self._quality_scenario(self.judgements())
        return self._run_all("quality of forecasts", [tried], self._quality_cases())

    def order(self) -> OrderGains | None:
        """Return what an order of service gains, if all of that was simulated."""
        scenario, cases = self._order_scenario(), self._order_cases()
        runs = self._runs.get(scenario, {})
        if not all(runs.get(case.key) for case in cases):
            return None
        return order_gains(scenario.clock, cases, runs)

    def judgements(self) -> list[Judgement]:
        """Return the verdict on every scenario in which each router has a run."""
        return [
            judge(scenario, self.cases, self._runs[scenario], self._config.slo)
            for scenario in self._scenarios
            if all(self._runs.get(scenario, {}).get(case.key) for case in self.cases)
        ]

    def quality(self, judged: Sequence[Judgement]) -> Quality | None:
        """Return how good forecasts must be, if that was simulated."""
        scenario = self._quality_scenario(judged)
        runs = self._runs[scenario]
        titles = [case.key for case in self._quality_cases() if case.key in runs]
        if not titles:
            return None
        judgement = next(j for j in judged if j.scenario is scenario)
        return judge_quality(judgement, titles, runs, self._sigma)

    def gains(self, judged: Sequence[Judgement]) -> dict[str, dict[str, Gain]]:
        """Return the gains over the first router, by scenario and router."""
        gains: dict[str, dict[str, Gain]] = {}
        for judgement in judged:
            runs = self._runs[judgement.scenario]
            base = runs[judgement.today.key]
            gains[judgement.scenario.key] = {
                case.key: gain(runs[case.key], base, judgement.figure) for case in self.cases
            }
        return gains

    def document(self, judged: Sequence[Judgement], quality: Quality | None) -> dict[str, Any]:
        """Return all figures and verdicts, as JSON takes them."""
        order = self.order()
        return {
            "order": None
            if order is None
            else {
                "clock": order.clock,
                "load": ORDER_LOAD,
                "recommended": order.pays,
                "latency_gain": {key: value.plain for key, value in order.latency.items()},
                "latency_p99_gain": {key: value.plain for key, value in order.tail.items()},
            },
            "scenarios": {j.scenario.key: self._scenario_document(j) for j in judged},
            "quality": None
            if quality is None
            else {
                "scenario": quality.scenario.key,
                "judged_by": quality.figure,
                "compared_with": quality.blind.key,
                "real_sigma": quality.sigma,
                "measurable_up_to_sigma": quality.lasts,
                "gains": {title: value.plain for title, value in quality.gains.items()},
            },
        }

    def _scenario_document(self, judgement: Judgement) -> dict[str, Any]:
        scenario, runs = judgement.scenario, self._runs[judgement.scenario]
        base = runs[judgement.today.key]
        routers = {
            key: {
                "gain": gain(by_seed, base, judgement.figure).plain,
                **summarise(list(by_seed.values())).plain,
            }
            for key, by_seed in runs.items()
        }
        return {
            "clock": scenario.clock,
            "load": scenario.load,
            "rate_scale": scenario.scale,
            "capacity_requests_per_s": scenario.capacity,
            "judged_by": judgement.figure,
            "compared_with": judgement.today.key,
            "best_without_lookahead": judgement.blind.key,
            "lookahead_gain": {key: value.plain for key, value in judgement.ahead.items()},
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

    def _order_scenario(self) -> Scenario:
        clock, most = list(self.capacities.items())[-1]
        return Scenario(clock, ORDER_LOAD, 1.0, False, most, at_random=True)

    def _order_cases(self) -> list[Case]:
        recorded = self._trace.recorded
        return order_cases(self._sigma, bool(len(recorded.prefixes) or recorded.client.any()))

    def _run_all(self, title: str, tried: Sequence[Scenario], cases: Sequence[Case]) -> bool:
        """Run cases with one seed after the other; return whether Ctrl-C ended that."""
        config, trace, step_time = self._config, self._trace, self._step_time
        seeds = range(config.seeds)
        jobs = [(scenario, case, i) for i in seeds for scenario in tried for case in cases]

        def figures(job: tuple[Scenario, Case, int]) -> Figures:
            return case_figures(*job, config, trace, step_time)

        def keep(job: tuple[Scenario, Case, int], found: Figures) -> None:
            scenario, case, seed = job
            self._runs.setdefault(scenario, defaultdict(dict))[case.key][seed] = found

        outcomes = run_in_threads(jobs, figures, min(os.cpu_count() or 1, _MOST_WORKERS))
        return gather(outcomes, len(jobs), keep, lambda job: title)
