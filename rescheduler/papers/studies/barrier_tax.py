r"""`headway papers barrier-tax`: what routing is worth, for several step-time models.

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
from pathlib import Path
from typing import Any

import numpy as np

from rescheduler.papers.studies.study import Report, draw_cases, run_study
from rescheduler.simulator.config.simulation_config import SimulationConfig, read_config
from rescheduler.simulator.experiments.runner import Row
from rescheduler.simulator.results.metrics import Summary, summarise
from rescheduler.simulator.results.report import markdown_table, signed_share
from rescheduler.simulator.simulation import run_setup


def barrier_tax(
    config: SimulationConfig,
    out: Path,
    cases: dict[str, dict[str, Any]],
    overheads: list[float],
    workers: int | None = None,
) -> int:
    """Compare routing policies behind a barrier, with arrivals counted in steps.

    They are compared for several overheads b of the step time max(L) + b · mean(L).

    Args:
        out: folder; run it again to resume.
        workers: processes at once; one per core if not set.
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
        found = _gains(rows, overheads)
        plain = [{"case": case, "policy": label, **s.plain} for (case, label), s in found.items()]
        labels = list(dict.fromkeys(label for _, label in found))
        shown = [(f"gain_{b:g}", 100.0, f"b = {b:g} a: % over {labels[0]}") for b in overheads]
        figure, _ = draw_cases(found, labels[1:], shown)
        return Report(plain, _table(found, overheads), {"barrier_tax.png": figure})

    return run_study("barrier-tax", config, out, workers, cases, report)


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


def _gains(rows: Sequence[Row], overheads: Sequence[float]) -> dict[tuple[str, str], Summary]:
    """Return for each case and policy, over the seeds, gains in throughput and imbalances.

    The figures are ``gain_B`` for each overhead B, the throughput over that of the case's first
    policy less 1, on the same requests; ``max_minus_min`` and ``imbalance`` in tokens, and
    ``idle_share``.
    """
    found: dict[tuple[str, str], Summary] = {}
    base: dict[str, Row] = {}
    totals: dict[str, tuple[int, int]] = {}
    for row in rows:
        case, _, policy, cells = row.group
        first = base.setdefault(case, row)
        runs = []
        for cell, figures, reference in zip(cells, row.runs, first.runs, strict=True):
            trace = f"{sorted(cell.config['trace'].items())} {cell.seed}"
            if trace not in totals:
                totals[trace] = _totals(cell.config, cell.seed)
            shared = cell.config["cluster"]["instances"], totals[trace]
            kept = {name: figures[name] for name in ("imbalance", "max_minus_min", "idle_share")}
            for b in overheads:
                own = retimed_throughput(figures, *shared, b)
                kept[f"gain_{b:g}"] = own / retimed_throughput(reference, *shared, b) - 1
            runs.append(kept)
        found[case, policy] = summarise(runs)
    return found


def _totals(config: dict[str, Any], seed: int) -> tuple[int, int]:
    """Return the tokens that a trace generates, and W."""
    setup = run_setup(read_config(config))
    tokens = token_steps = 0
    for block in setup.trace.blocks(np.random.default_rng(seed)):
        output = block.output
        tokens += int(output.sum())
        token_steps += int((output * block.prompt + output * (output - 1) // 2).sum())
    return tokens, token_steps


def _table(found: Mapping[tuple[str, str], Summary], overheads: Sequence[float]) -> list[str]:
    heads = ["case", "policy", *(f"b = {b:g}" for b in overheads)]
    heads += ["max − min, tokens", "idle share"]
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
