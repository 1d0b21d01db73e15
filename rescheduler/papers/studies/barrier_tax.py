r"""`headway study barrier-tax`: what routing is worth, for several step-time models.

The EP Barrier Tax (Li 2026) counts arrivals in decode steps: its gains for different overheads b
differ as :math:`(\max_g L_g + b \bar L)` of the same loads does (12.0, 9.4, 8.2 and 6.2% for b = 0,
0.3, 0.5 and 1 are one maximum of 1.23 and one of 1.10 times the mean), and arrivals in seconds
would give every policy the throughput that arrives. So the loads are simulated with a step a
second, and the seconds of the model are put in afterwards, exactly:

.. math:: T_b = a \sum_t \max_g L_g(t) + b \sum_t \bar L(t)
             = \frac{a}{G} \big(n_{steps} \cdot I + W\big) + \frac{b}{G} W, \qquad
          W = \sum_i \Big(o_i p_i + \frac{o_i (o_i - 1)}{2}\Big)

with the mean imbalance I, and W, the context tokens of all steps of all requests.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rescheduler.papers.studies.declaration import Report, Study
from rescheduler.simulator.config.config_parser import read_config
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.experiments.runner import Row
from rescheduler.simulator.results.figures import finish_axes
from rescheduler.simulator.results.metrics import Summary, summarise
from rescheduler.simulator.results.tables import markdown_table, signed_share
from rescheduler.simulator.run_setup import run_setup

__all__ = ["barrier_tax", "gains", "retimed_throughput"]


class _TraceTotals(NamedTuple):
    """What a trace adds up to.

    Attributes:
        tokens: generated.
        token_steps: W, context tokens of all steps of all requests.
    """

    tokens: int
    token_steps: int


def barrier_tax(
    config: SimulationConfig, cases: dict[str, dict[str, Any]], overheads: list[float]
) -> Study:
    """Compare routing policies behind a barrier, with arrivals counted in steps.

    They are compared for several overheads b of the step time max(L) + b · mean(L).

    Args:
        config: what all cases share; a step must take a second, and the first policy is the one
            that the others are compared with.
        cases: name -> key -> value, such as ``"8": {cluster.instances: 8, arrivals.rate: 1.8}``.
        overheads: b / a of the step-time models.

    Raises:
        ValueError: steps of another length, or requests that do not run to their end.
    """
    if config.step_time != {"name": "moe", "a": 0.0, "b": 0.0, "constant": 1.0}:
        raise ValueError("step_time: {name: moe, a: 0.0, b: 0.0, constant: 1.0}, a step a second")
    if config.drift != [1] or config.max_steps is not None:
        raise ValueError("drift, max_steps: every request must run to its end, a token a step")

    def report(rows: Sequence[Row]) -> Report:
        found = gains(rows, overheads)
        plain = [{"case": case, "policy": label, **s.plain} for (case, label), s in found.items()]
        return Report(plain, _table(found, overheads), {"barrier_tax.png": _draw(found, overheads)})

    return Study(cases, report)


def retimed_throughput(
    figures: Mapping[str, float], n_instances: int, totals: tuple[int, int], overhead: float
) -> float:
    """Return tokens per unit of time a = 1, for a step time of max L + b · mean L.

    Args:
        figures: of a run behind a barrier that ended every request; ``steps`` and ``imbalance``.
        n_instances: G.
        totals: tokens generated, and W.
        overhead: b / a.
    """
    tokens, token_steps = totals
    highest = figures["steps"] * figures["imbalance"] + token_steps
    return tokens * n_instances / (highest + overhead * token_steps)


def gains(rows: Sequence[Row], overheads: Sequence[float]) -> dict[tuple[str, str], Summary]:
    """Return for each case and policy, over the seeds, gains in throughput and imbalances.

    The figures are ``gain_B`` for each overhead B, the throughput over that of the case's first
    policy less 1, on the same requests; ``max_minus_min`` and ``imbalance`` in tokens, and
    ``idle_share``.
    """
    found: dict[tuple[str, str], Summary] = {}
    base: dict[str, Row] = {}
    totals: dict[str, _TraceTotals] = {}
    for row in rows:
        case, _, policy, cells = row.group
        first = base.setdefault(case, row)
        runs = []
        for cell, figures, reference in zip(cells, row.runs, first.runs, strict=True):
            described = _trace_key(cell.config, cell.seed)
            if described not in totals:
                totals[described] = _totals(cell.config, cell.seed)
            of_trace = totals[described]
            n_instances = cell.config["cluster"]["instances"]
            kept = {name: figures[name] for name in ("imbalance", "max_minus_min", "idle_share")}
            for b in overheads:
                own = retimed_throughput(figures, n_instances, of_trace, b)
                other = retimed_throughput(reference, n_instances, of_trace, b)
                kept[f"gain_{b:g}"] = own / other - 1
            runs.append(kept)
        found[case, policy] = summarise(runs)
    return found


def _trace_key(config: Mapping[str, Any], seed: int) -> str:
    """Return what distinguishes the traces of cells."""
    return f"{sorted(config['trace'].items())} {seed}"


def _totals(config: dict[str, Any], seed: int) -> _TraceTotals:
    setup = run_setup(read_config(config))
    tokens = token_steps = 0
    for block in setup.trace.blocks(np.random.default_rng(seed)):
        output = block.output
        tokens += int(output.sum())
        token_steps += int((output * block.prompt + output * (output - 1) // 2).sum())
    return _TraceTotals(tokens, token_steps)


def _table(found: Mapping[tuple[str, str], Summary], overheads: Sequence[float]) -> list[str]:
    heads = [
        "case",
        "policy",
        *(f"b = {b:g}" for b in overheads),
        "max − min, tokens",
        "idle share",
    ]
    rows = []
    for (case, label), summary in found.items():
        mean, half = summary.mean, summary.ci95
        names = [f"gain_{b:g}" for b in overheads]
        intervals = [f" ± {half[name]:.1%}" if half.get(name) else "" for name in names]
        shown = [signed_share(mean[n]) + s for n, s in zip(names, intervals, strict=True)]
        last = [f"{mean['max_minus_min']:,.0f}", f"{mean['idle_share']:.1%}"]
        rows.append([case, label, *shown, *last])
    note = "Throughput against the first policy, on the same requests."
    return [*markdown_table(heads, rows, "ll"), "", note]


def _draw(found: Mapping[tuple[str, str], Summary], overheads: Sequence[float]) -> Any:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(case for case, _ in found))
    labels = list(dict.fromkeys(label for _, label in found))[1:]
    figure = Figure(figsize=(1.6 + 2.9 * len(overheads), 3.6), layout="constrained")
    panels = figure.subplots(1, len(overheads), sharey=True, squeeze=False)[0]
    colours = colormaps["viridis"](np.linspace(0.0, 0.9, len(labels)))
    places = np.arange(len(cases))
    for axes, b in zip(panels, overheads, strict=True):
        for i, label in enumerate(labels):
            name = f"gain_{b:g}"
            known = [found.get((case, label)) for case in cases]
            values = [100 * s.mean[name] if s else np.nan for s in known]
            half = [100 * s.ci95.get(name, 0.0) if s else 0.0 for s in known]
            at = places + 0.12 * (i - (len(labels) - 1) / 2)
            axes.errorbar(at, values, half, fmt="o", color=colours[i], markersize=4, label=label)
        axes.axhline(0.0, color="0.5", linewidth=0.8)
        axes.set_xticks(places, cases)
        axes.set_title(f"b = {b:g} a", fontsize="medium")
        finish_axes(axes)
    panels[0].set_ylabel("throughput against the first policy, %")
    panels[0].legend(frameon=False, fontsize="small")
    return figure
