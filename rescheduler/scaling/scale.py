"""`headway scale`: what rules for the number of replicas cost on traffic like a trace's."""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console

from data_collection.atomic_file import refuse_unwritable
from data_collection.versions import machine, source_commit, versions
from data_collection.workload.arrivals import TimeUnit
from predictor.compilation import is_kept
from rescheduler.emulation.emulate_options import EmulatedMachine, read_machine
from rescheduler.scaling.arrivals import forecast_rates
from rescheduler.scaling.capacity import past_lengths, sustained_rate
from rescheduler.scaling.fleet import Machine, advance
from rescheduler.scaling.outcome import (
    DRAWN,
    document,
    draw_days,
    outcome_table,
    sentences,
    shown_day,
)
from rescheduler.scaling.rules import RULES
from rescheduler.scaling.scale_config import ScaleConfig
from rescheduler.scaling.simulated_day import Operation
from rescheduler.scaling.study import Arm, Found, ScalingStudy, Traffic
from rescheduler.simulator.experiments.progress import progress_bar
from rescheduler.simulator.results.report import json_text, write_report
from rescheduler.simulator.workloads.trace import ResampledTrace, first_requests
from rescheduler.simulator.workloads.trace_files import TraceFile
from rescheduler.simulator.workloads.trace_formats import TraceFormatName
from rescheduler.step_time.step_time import batch_step_time

__all__ = ["prepared", "recorded_trace", "replica", "scale"]

_MOST_READ = 1_000_000
_TICK = 1.0
_WIDTH = 130
_COMPARED_FROM = 1000
"""Seed of the first day that rules are compared on, apart from those of training."""


def scale(
    config: ScaleConfig,
    simulate: Path | None = None,
    skip_empty: bool = False,
    format: TraceFormatName | None = None,
    time_unit: TimeUnit | None = None,
    json: Path | None = None,
    figure: Path | None = None,
) -> int:
    """Compare rules that say how many replicas run, on simulated days of requests like a trace's.

    A replica takes minutes to start, and is paid for from then on until it has drained. Each rule
    gets the cheapest target that keeps the objectives on days of training; then all rules serve
    the same other days. Prints the requests in time and the GPU-hours, with 95% intervals over
    days, and what each part of a rule that forecasts does. Public traces last an hour or two, so
    that a day's arrivals are made up: --day and docs/scale.md say how. Its requests are the
    trace's own.

    Rules that react: fixed (a number that stays), queue (requests that wait), kv_usage (KV cache
    in use), running (requests that run), load (the fuller of requests and KV cache), rate
    (requests of the last minute). Rules that forecast: arrivals (by the time of day), load_ahead
    (what will still run of what runs now), load+arrivals, load_ahead+arrivals, and oracle, which
    knows the arrivals and the lengths to come.

    Args:
        config: the comparison.
        simulate: trace whose requests are served: Azure's, BurstGPT's, Mooncake's or Headway's own
            columns, plain or gzipped.
        skip_empty: leave out requests without prompt or output tokens.
        format: headway, azure, burstgpt or mooncake; told by the first line when null.
        time_unit: s, ms, us or ns, of the arrivals; as the format has it when null.
        json: write all figures to this file.
        figure: draw replicas over the first day to this PNG file.

    Raises:
        ValueError: a file, an option or a request that cannot be simulated.
    """
    if simulate is None:
        raise ValueError(
            "give --simulate TRACE, a file of requests that simulated fleets serve; a deployment "
            "that runs is not scaled"
        )
    file = TraceFile(simulate, None, skip_empty, format, time_unit, option="--time-unit")
    emulated = read_machine(config.machine)
    trace = recorded_trace(file)
    if config.times == "recorded" and len(trace.recorded.prompt) == _MOST_READ:
        raise ValueError(
            f"{simulate}: its own times are kept of {_MOST_READ - 1:,} requests at most: cut it to "
            "its last days"
        )
    study = prepared(config, trace, emulated)
    _refuse_outputs(simulate, json, figure)
    print(f"headway scale: {file.read_as}", file=sys.stderr)
    if not is_kept(advance):
        print("compiling the simulation: a few seconds, only once", file=sys.stderr, flush=True)
    arms = [Arm(name, config.lengths) for name in config.names]
    with progress_bar() as bar:
        task = bar.add_task("days", total=len(config.start_seconds) * study.runs(len(arms)))
        study.simulated = lambda: bar.advance(task)
        found = {seconds: study.compare(arms, seconds) for seconds in config.start_seconds}
    described = _described(config, study)
    print(described)
    for seconds, rules in found.items():
        title = f"{seconds:g} s to start"
        print()
        Console(width=_WIDTH).print(outcome_table(rules, emulated.gpus, config.keep, title))
        print("\n".join(sentences(rules, config.keep)))
    made = {
        "_about": {
            "made_by": "headway scale",
            "config": asdict(config),
            "commit": source_commit(),
            "machine": machine(),
            "versions": versions(),
            "traces": [file.read_as],
        },
        "simulated": described,
        "start_seconds": {
            f"{seconds:g}": document(rules, emulated.gpus) for seconds, rules in found.items()
        },
    }
    if json is not None:
        write_report(json.parent, {json.name: json_text(made, allow_nan=False)}, {})
    if figure is not None:
        drawn = _figure(found, study)
        write_report(figure.parent, {}, {figure.name: drawn})
    for path in filter(None, (json, figure)):
        print(f"wrote {path}")
    return 0


def _refuse_outputs(trace: Path, json: Path | None, figure: Path | None) -> None:
    """Refuse before long work what cannot be written after it, and make folders for the others."""
    if figure is not None and figure.suffix != ".png":
        raise ValueError(f"--figure {figure}: it is a PNG file; name it so")
    written = [path for path in (json, figure) if path is not None]
    for path in written:
        path.parent.mkdir(parents=True, exist_ok=True)
        refuse_unwritable(path)
    if len({path.resolve() for path in (trace, *written)}) <= len(written):
        raise ValueError("the trace, --json and --figure must be files of their own")


def recorded_trace(file: TraceFile) -> ResampledTrace:
    """Return the requests in a file."""
    requests = first_requests(file, np.random.default_rng(0), _MOST_READ)
    return ResampledTrace(file.name, requests, len(requests.prompt))


def replica(emulated: EmulatedMachine, slots: int, moves: bool) -> Machine:
    """Return what a replica on a machine is like.

    Raises:
        ValueError: nothing says how much its KV cache holds, or a step takes no time.
    """
    step, transfer = emulated.step_time, emulated.transfer
    if emulated.kv_tokens is None:
        raise ValueError(f"{emulated.machine}: its file says no kv_tokens that a KV cache holds")
    if step.constant <= 0:
        raise ValueError(f"{emulated.machine}: step_time.constant must be above 0")
    per_token = 0.0
    if transfer is not None:
        per_token = transfer.bytes_per_token / (1e9 * transfer.gigabytes_per_second)
    return Machine(
        step_time=batch_step_time(step.constant, step.per_new, step.per_context),
        slots=slots,
        capacity=float(emulated.kv_tokens),
        batched_tokens=emulated.max_num_batched_tokens or 8192,
        move_seconds=0.0 if transfer is None else transfer.latency_s,
        move_seconds_per_token=per_token,
        tick=_TICK,
        moves=moves,
    )


def prepared(config: ScaleConfig, trace: ResampledTrace, emulated: EmulatedMachine) -> ScalingStudy:
    """Return the study that a configuration describes.

    Raises:
        ValueError: a request that no replica can serve, too little history, too many requests.
    """
    each = replica(emulated, config.slots, config.moves)
    prompt, output = trace.recorded.prompt, trace.recorded.output
    tokens = prompt + output
    too_large = int(np.count_nonzero(tokens > each.capacity))
    if too_large:
        raise ValueError(
            f"{trace.name}: {too_large:,} of {len(tokens):,} requests need more than the "
            f"{each.capacity:,.0f} tokens that a replica of {config.machine} holds; the largest "
            f"needs {tokens.max():,}: choose another --machine, or take them out"
        )
    sustained = sustained_rate(each, past_lengths(prompt, output), config.slo.tpot_s)
    if sustained == 0:
        raise ValueError(
            f"a replica of {config.machine} takes more than {config.slo.tpot_s:g} s a token "
            "whatever its load: give a longer --slo.tpot-s"
        )
    recorded = config.times == "recorded"
    if config.rate is not None:
        mean = config.rate
    elif recorded:
        mean = trace.rate
    else:
        mean = config.peak_replicas * sustained / (1 + config.day.swing)
    traffic = Traffic(trace, config.day, mean, config.period_hours * 3600, config.times)
    if any(RULES[name].forecasts_arrivals for name in config.names if name in RULES):
        forecast_rates(traffic.day(0), 1)  # refused before anything is simulated, if it is
    return ScalingStudy(
        traffic=traffic,
        machine=each,
        operation=Operation(
            start_seconds=config.start_seconds[0],
            interval=config.interval,
            least=config.least,
            most=config.most,
            tolerance=config.tolerance,
            stabilisation=config.stabilisation,
            victim=config.victim,
            drain_seconds=config.drain_seconds,
        ),
        slo=(config.slo.ttft_s, config.slo.tpot_s),
        keep=config.keep,
        training=range(1 if recorded else config.training),
        seeds=(range(1) if recorded else range(_COMPARED_FROM, _COMPARED_FROM + config.seeds)),
    )


def _described(config: ScaleConfig, study: ScalingStudy) -> str:
    """Return sentences on what was simulated."""
    traffic = study.traffic
    served = sustained_rate(study.machine, traffic.lengths, study.slo[1])
    days = (
        "The trace's own times: targets are chosen in hindsight, on the day that is shown."
        if config.times == "recorded"
        else f"Days are made up; targets were chosen on {len(study.training)} of them, and these "
        f"are {len(study.seeds)} others: ± is half a 95% interval."
    )
    return (
        f"{traffic.trace.name}: {len(traffic.trace.recorded.prompt):,} requests, "
        f"{traffic.lengths.prompt:,.0f} prompt and {traffic.lengths.output:,.0f} output tokens on "
        f"average; {traffic.mean:.3g} a second, and a replica of {config.machine} serves "
        f"{served:.3g}. In time: {study.slo[0]:g} s to the first token, {study.slo[1]:g} s a "
        f"token; targets are to keep {100 * config.keep:g}% so. {days}"
    )


def _figure(found: Mapping[float, Mapping[Arm, Found]], study: ScalingStudy) -> object:
    needed = study.needed(study.seeds[0])
    arms = [arm.rule for arm in next(iter(found.values()))]
    rules = [rule for rule in DRAWN if rule in arms] or arms
    return draw_days(
        {f"{seconds:g} s to start": shown_day(one, needed, rules) for seconds, one in found.items()}
    )
