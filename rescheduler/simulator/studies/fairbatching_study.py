r"""`headway study fairbatching`: how many requests a second each system serves in time.

As in FairBatching (Lyu et al. 2025, §5): requests are offered at several loads, a system's
effective requests per second at a load are

.. math:: \text{offered requests per second} \cdot (1 - \text{share that violates an objective})

and its peak over the loads is what systems are compared by. Systems may have options that are
tuned for each case, as Sarathi's token budget is there.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rescheduler.simulator.config.config_parser import config_parser, parsed_config, read_config
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.results.fairbatching_figures import LoadCurve, draw_effective
from rescheduler.simulator.results.figures import save_figure
from rescheduler.simulator.results.metrics import summarise
from rescheduler.simulator.run_setup import run_setup
from rescheduler.simulator.sweeps.study_cases import compute_cases, write_study
from rescheduler.simulator.sweeps.sweep_cells import groups

__all__ = ["fairbatching", "fairbatching_command"]

_DESCRIPTION = """Compare batch formations, admission and routing by the requests that they serve in
time, at several loads."""

Options = Mapping[str, Any]


def fairbatching_command(arguments: list[str]) -> int:
    """Run the study with a command line; return the exit status."""
    parser = config_parser("study fairbatching", _DESCRIPTION)
    parser.add_function_arguments(fairbatching, skip={"config"})
    given = parser.parse_args(arguments)
    config = parsed_config(parser, given)
    return fairbatching(
        config,
        given.out,
        given.cases,
        given.systems,
        given.loads,
        given.baselines,
        given.tuned,
        given.case_loads,
        given.latency_load,
        given.workers,
    )


def fairbatching(
    config: SimulationConfig,
    out: Path,
    cases: dict[str, dict[str, Any]],
    systems: dict[str, dict[str, Any]],
    loads: list[float],
    baselines: list[str],
    tuned: dict[str, dict[str, list[Any]]] | None = None,
    case_loads: dict[str, list[float]] | None = None,
    latency_load: float | None = None,
    workers: int | None = None,
) -> int:
    """Simulate all systems at all loads, write table, JSON and figure; return the exit status.

    Args:
        config: what all share.
        out: folder; run it again to resume.
        cases: name -> key -> value: workloads, objectives, clusters.
        systems: name -> key -> value, such as ``Sarathi: {prefill.formation: sarathi}``.
        loads: requests per second an instance; arrivals of a trace are scaled to them.
        baselines: the systems with whose best peak the others are compared.
        tuned: system -> key -> values, of which the best is taken in each case.
        case_loads: case -> loads, in place of ``loads``.
        latency_load: of the table of latencies; each case's nearest load, the middle one when
            not given.
        workers: processes at once; one a core when not given.

    Raises:
        ValueError: a key or value that means nothing, or the name of no system or case.
    """
    _refuse_unknown("baselines", baselines, systems)
    _refuse_unknown("tuned", tuned or {}, systems)
    _refuse_unknown("case_loads", case_loads or {}, cases)
    if config.slo is None or not baselines:
        raise ValueError("slo and baselines: what is in time, and better than what")
    chosen: dict[str, tuple[str, str, dict[str, Any], float]] = {}
    described: dict[str, dict[str, Any]] = {}
    for case, changes in cases.items():
        own = _changed(config, changes)
        for system, how in systems.items():
            for options in _combinations((tuned or {}).get(system, {})):
                for load in (case_loads or {}).get(case, loads):
                    name = ", ".join([case, system, *_said(options), f"{load:g}/s"])
                    chosen[name] = case, system, options, load
                    described[name] = {**changes, **how, **options, **_at_load(own, load)}
    rows = compute_cases(config, described, {}, out, "study fairbatching", workers)
    points: dict[tuple[str, str, str], LoadCurve] = {}
    for row in rows:
        case, system, options, load = chosen[row.case]
        key = case, system, str(options)
        curve = points.setdefault(key, LoadCurve(case, system, options, {}))
        curve.points[load] = summarise([_with_effective(figures) for figures in row.runs])
    best = _best(points.values())
    save_figure(draw_effective(best), out / "effective.png")
    table = [*_peaks(best, baselines), "", *_latencies(best, latency_load)]
    plain = [_plain(curve, load) for curve in points.values() for load in curve.points]
    write_study(out, "study fairbatching", config, plain, table)
    return 0


def _refuse_unknown(key: str, named: Sequence[str] | Options, known: Options) -> None:
    for name in named:
        if name not in known:
            raise ValueError(f"{key}: {name!r} is none of {', '.join(known)}")


def _changed(config: SimulationConfig, changes: Options) -> SimulationConfig:
    """Return a case's configuration, whose seeds and policies do not matter here."""
    every = {key: [value] for key, value in changes.items()}
    (first, *_) = groups(replace(config, seeds=1), every)
    return read_config(first.cells[0].config)


def _at_load(config: SimulationConfig, load: float) -> dict[str, float]:
    """Return what makes requests arrive at so many a second an instance."""
    rate = load * config.cluster.instances
    if config.arrivals.kind != "trace":
        return {"arrivals.rate": rate}
    blocks = list(run_setup(config).trace.blocks(np.random.default_rng(0)))
    own = sum(len(block.arrival) for block in blocks) / float(blocks[-1].arrival[-1])
    return {"arrivals.scale": rate / own}


def _combinations(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def _said(options: Options) -> list[str]:
    return [f"{key.rpartition('.')[2]} {value}" for key, value in options.items()]


def _with_effective(figures: dict[str, float]) -> dict[str, float]:
    return figures | {"effective": figures["offered_per_s"] * (1 - figures["violated"])}


def _best(curves: Iterable[LoadCurve]) -> list[LoadCurve]:
    """Return each system's curve in each case with the tuned options whose peak is highest."""
    best: dict[tuple[str, str], LoadCurve] = {}
    for curve in curves:
        key = curve.case, curve.system
        if key not in best or curve.peak > best[key].peak:
            best[key] = curve
    return list(best.values())


def _peaks(best: Sequence[LoadCurve], baselines: Sequence[str]) -> list[str]:
    heads = "peak effective requests/s | at requests/s an instance | over the best baseline | tuned"
    lines = [f"| case | system | {heads} |", "|---|---|---:|---:|---:|---|"]
    for curve in best:
        others = [c for c in best if c.case == curve.case and c.system in baselines]
        base = max(other.peak[0] for other in others)
        peak, load = curve.peak
        gain = f"{peak / base - 1:+.1%}".replace("-", "−") if base > 0 else "–"
        half = curve.points[load].ci95.get("effective")
        interval = "" if half is None else f" ± {half:.3f}"
        said = ", ".join(_said(curve.tuned))
        lines.append(
            f"| {curve.case} | {curve.system} | {peak:.3f}{interval} | {load:g} | {gain} | {said} |"
        )
    return lines


def _latencies(best: Sequence[LoadCurve], latency_load: float | None) -> list[str]:
    heads = [
        f"{name} P{percentile}, ms" for name in ("TTFT", "TPOT") for percentile in (50, 95, 99)
    ]
    lines = [
        f"| case | system | requests/s an instance | {' | '.join(heads)} | violated | rejected |",
        "|---|---|" + "---:|" * 9,
    ]
    for curve in best:
        loads = sorted(curve.points)
        wanted = loads[len(loads) // 2] if latency_load is None else latency_load
        load = min(loads, key=lambda at: abs(at - wanted))
        mean = curve.points[load].mean
        tpot = "tpot_worst" if "tpot_worst" in mean else "tpot"
        cells = [
            f"{1e3 * mean[f'{name}_p{percentile}']:,.0f}"
            for name in ("ttft", tpot)
            for percentile in (50, 95, 99)
        ]
        lines.append(
            f"| {curve.case} | {curve.system} | {load:g} | {' | '.join(cells)} | "
            f"{mean['violated']:.1%} | {mean['rejected']:,.0f} |"
        )
    return lines


def _plain(curve: LoadCurve, load: float) -> dict[str, Any]:
    summary = curve.points[load]
    named = {"case": curve.case, "system": curve.system, "tuned": curve.tuned, "load": load}
    return named | {"runs": summary.runs, **summary.mean, "ci95": summary.ci95}
