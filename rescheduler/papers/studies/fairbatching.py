r"""`headway papers fairbatching`: how many requests a second each system serves in time.

As in FairBatching (Lyu et al. 2025, §5): requests are offered at several loads, a system's
effective requests per second at a load are

.. math:: \text{offered requests per second} \cdot (1 - \text{share that violates an objective})

and its peak over the loads is what systems are compared by. Systems may have options that are
tuned for each case, as Sarathi's token budget is there.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rescheduler.papers.studies.study import Report, run_study
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.experiments.runner import Row
from rescheduler.simulator.experiments.workers import changed_config
from rescheduler.simulator.results.metrics import Summary, summarise
from rescheduler.simulator.results.report import (
    COLOURS,
    create_panels,
    finish_axes,
    markdown_table,
    signed_share,
)
from rescheduler.simulator.simulation import run_setup

Options = Mapping[str, Any]


class LoadCurve(NamedTuple):
    """One system in one case, with one choice of its tuned options, over the loads.

    Attributes:
        tuned: key -> value, of its tuned options.
        points: load in requests per second an instance -> figures; ``effective`` among them.
    """

    case: str
    system: str
    tuned: dict[str, Any]
    points: dict[float, Summary]

    @property
    def peak(self) -> tuple[float, float]:
        """Its most effective requests per second, and the load where they are."""
        return max((summary.mean["effective"], load) for load, summary in self.points.items())


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
    """Compare batch formations, admission and routing by the requests served in time.

    Every system is offered several loads.

    Args:
        out: folder; run it again to resume.
        workers: processes at once; one per core if not set.
        config: what all share.
        cases: name -> key -> value: workloads, objectives, clusters.
        systems: name -> key -> value, such as ``Sarathi: {prefill.formation: sarathi}``.
        loads: requests per second per instance; arrivals of a trace are scaled to them.
        baselines: the systems with whose best peak the others are compared.
        tuned: system -> key -> values; the best value is taken in each case.
        case_loads: case -> loads, instead of ``loads``.
        latency_load: of the table of latencies; each case's nearest load, the middle one when
            not given.

    Raises:
        ValueError: a key or value that does not exist, or an unknown system or case.
    """
    _refuse_unknown("baselines", baselines, systems)
    _refuse_unknown("tuned", tuned or {}, systems)
    _refuse_unknown("case_loads", case_loads or {}, cases)
    if config.slo is None or not baselines:
        raise ValueError("slo and baselines: what is in time, and better than what")
    chosen: dict[str, tuple[str, str, dict[str, Any], float]] = {}
    described: dict[str, dict[str, Any]] = {}
    for case, changes in cases.items():
        own = changed_config(config, changes, f"cases.{case}")
        for system, how in systems.items():
            for options in _combinations((tuned or {}).get(system, {})):
                for load in (case_loads or {}).get(case, loads):
                    name = ", ".join([case, system, *_said(options), f"{load:g}/s"])
                    chosen[name] = case, system, options, load
                    described[name] = {**changes, **how, **options, **_at_load(own, load)}

    def report(rows: Sequence[Row]) -> Report:
        points: dict[tuple[str, str, str], LoadCurve] = {}
        for row in rows:
            case, system, options, load = chosen[row.group.case]
            key = case, system, str(options)
            curve = points.setdefault(key, LoadCurve(case, system, options, {}))
            curve.points[load] = summarise([_with_effective(figures) for figures in row.runs])
        best = _best(points.values())
        return Report(
            rows=[
                {"case": case, "system": system, "tuned": options, "load": load, **summary.plain}
                for case, system, options, summaries in points.values()
                for load, summary in summaries.items()
            ],
            table=[*_peaks(best, baselines), "", *_latencies(best, latency_load)],
            figures={"effective.png": _draw(best)},
        )

    return run_study("fairbatching", config, out, workers, described, report)


def _refuse_unknown(key: str, named: Sequence[str] | Options, known: Options) -> None:
    for name in named:
        if name not in known:
            raise ValueError(f"{key}: {name!r} is none of {', '.join(known)}")


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
    rows = []
    for curve in best:
        others = [c for c in best if c.case == curve.case and c.system in baselines]
        base = max(other.peak[0] for other in others)
        peak, load = curve.peak
        gain = signed_share(peak / base - 1) if base > 0 else "–"
        half = curve.points[load].ci95.get("effective")
        shown = f"{peak:.3f}" if half is None else f"{peak:.3f} ± {half:.3f}"
        tuned = ", ".join(_said(curve.tuned))
        rows.append([curve.case, curve.system, shown, f"{load:g}", gain, tuned])
    heads = ["case", "system", "peak effective requests/s", "at requests/s an instance"]
    return markdown_table([*heads, "over the best baseline", "tuned"], rows, "llrrrl")


def _latencies(best: Sequence[LoadCurve], latency_load: float | None) -> list[str]:
    percentiles = [(name, at) for name in ("TTFT", "TPOT") for at in (50, 95, 99)]
    heads = ["case", "system", "requests/s an instance"]
    heads += [*(f"{name} P{at}, ms" for name, at in percentiles), "violated", "rejected"]
    rows = []
    for curve in best:
        loads = sorted(curve.points)
        wanted = loads[len(loads) // 2] if latency_load is None else latency_load
        load = min(loads, key=lambda at: abs(at - wanted))
        mean = curve.points[load].mean
        named = {"TTFT": "ttft", "TPOT": "tpot_worst" if "tpot_worst" in mean else "tpot"}
        cells = [f"{1e3 * mean[f'{named[name]}_p{at}']:,.0f}" for name, at in percentiles]
        last = [f"{mean['violated']:.1%}", f"{mean['rejected']:,.0f}"]
        rows.append([curve.case, curve.system, f"{load:g}", *cells, *last])
    return markdown_table(heads, rows, "ll")


def _draw(curves: Sequence[LoadCurve]) -> Any:
    """Return effective requests per second over the load by case, as FairBatching's Figure 5."""
    cases = list(dict.fromkeys(curve.case for curve in curves))
    systems = list(dict.fromkeys(curve.system for curve in curves))
    figure, panels = create_panels(len(cases), 4, (3.4, 2.6), sharex=False, sharey=False)
    for curve in curves:
        axes, colour = panels[cases.index(curve.case)], COLOURS[systems.index(curve.system) % 8]
        loads = sorted(curve.points)
        values = [curve.points[load].mean["effective"] for load in loads]
        half = [curve.points[load].ci95.get("effective", 0.0) for load in loads]
        drawn: Options = {"markersize": 3.5, "linewidth": 1.2, "label": curve.system}
        axes.errorbar(loads, values, half, fmt="o-", color=colour, **drawn)
    for axes, case in zip(panels, cases, strict=True):
        axes.set_title(case, loc="left", fontsize="medium")
        axes.set_ylim(bottom=0)
        finish_axes(axes)
    panels[0].legend(frameon=False, fontsize="small")
    figure.supxlabel("offered requests/s an instance", fontsize="medium")
    figure.supylabel("effective requests/s", fontsize="medium")
    return figure
