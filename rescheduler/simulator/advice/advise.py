"""`headway advise`: estimate whether forecasting pays off on a trace."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_collection.files import refuse_unwritable
from data_collection.workload.arrivals import TimeUnit
from rescheduler.simulator.advice.study import Study
from rescheduler.simulator.advice.text import advice_text, draw_advice
from rescheduler.simulator.advice.verdicts import ROUTERS, Clock
from rescheduler.simulator.config.simulation_config import (
    ClusterConfig,
    SimulationConfig,
    SLOConfig,
)
from rescheduler.simulator.experiments.workers import compile_notice
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
from rescheduler.simulator.workloads.trace_files import TraceFile
from rescheduler.simulator.workloads.trace_formats import TraceFormatName
from rescheduler.step_time.step_time import create_step_time

_MOST_READ = 1_000_000
_REQUESTS = 20_000
_TOKENS = 20_000_000
_TURNS = 8
_MOST_LOAD = 1.2


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
        kv_capacity: context tokens that an instance holds; null is unlimited.
        clock: barrier (expert parallelism: all instances step together), independent (replicas),
            or both.
        load: scale arrivals to this part of the estimated capacity, at most 1.2; as recorded
            when null.
        step_time: {name: bfio | moe | batch | table | profile, ...options}, seconds of a step;
            bfio when null.
        requests: simulated in a run; when null 20,000, or fewer that generate 20 million tokens,
            but 8 for each slot at least.
        seeds: runs of each router.
        slo: {ttft_s, tpot_s}; judges the requests that meet it instead of mean latency.
        recording: of a predictor's forecasts (`headway record`), whose error is what real
            forecasts have; that of the included checkpoint when null.
        skip_empty: leave out requests without prompt or output tokens.
        format: headway, azure, burstgpt or mooncake; told by the first line when null.
        time_unit: s, ms, us or ns, of the arrivals; as the format has it when null. If the trace
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
