"""What the measurements say: tables, a verdict, a figure."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import exp, log
from pathlib import Path
from typing import NamedTuple

from benchmarks.barrier.engines import Kind
from benchmarks.barrier.fit import Fit, disagreement, fits, observed
from benchmarks.barrier.grid import Measured
from benchmarks.support.report import mean_of, paired_difference
from rescheduler.simulator.results.report import markdown_table

Grids = Mapping[Kind, Sequence[Measured]]
"""The same points of ranks of a group, and of lone engines."""

Rounds = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Figures by arm and round."""

SHOWN = {
    "throughput, tokens/s": ("throughput", 1.0, ".0f"),
    "TPOT mean, ms": ("tpot_mean", 1e3, ".1f"),
    "TPOT P99, ms": ("tpot_p99", 1e3, ".1f"),
    "TTFT mean, s": ("ttft_mean", 1.0, ".2f"),
    "step, ms": ("step_mean", 1e3, ".1f"),
    "context of the fuller rank / mean": ("fullest", 1.0, ".3f"),
}

_UNITS = {
    "constant": "",
    "new": " a request",
    "own": "of its own",
    "other": "of the other",
    "max": "of the fullest",
    "mean": "of the mean",
}
_TOGETHER = 0.05
"""Steps that differ by less are the same ones."""


class Ratio(NamedTuple):
    """A geometric mean of ratios over rounds, with its 95% interval by Student's t."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio_of(values: Mapping[int, float], others: Mapping[int, float]) -> Ratio:
    """Return how many times the others' these values are, paired by round."""
    logs = paired_difference(
        {i: log(value) for i, value in values.items()}, {i: log(o) for i, o in others.items()}
    )
    return Ratio(exp(logs.mean), exp(logs.mean - logs.half), exp(logs.mean + logs.half))


def grid_table(grids: Grids) -> str:
    rows = []
    for same in zip(*grids.values(), strict=True):
        loads = ", ".join(
            f"{n:.0f} × {c / n:,.0f}" if n else "none"
            for n, c in zip(same[0].requests, same[0].context, strict=True)
        )
        times = [
            ", ".join(
                f"{1e3 * t:.1f}" if k else "–" for t, k in zip(one.seconds, one.steps, strict=True)
            )
            for one in same
        ]
        rows.append([loads, *times])
    heads = ["tokens of context", *(f"{kind}: step, ms" for kind in grids)]
    return "\n".join(markdown_table(heads, rows))


def grid_figures(grids: Grids) -> dict[str, float]:
    figures: dict[str, float] = {}
    for kind, points in grids.items():
        figures[f"{kind}_steps_differ"] = disagreement(points)
        for model, fit in fits(observed(points)).items():
            name = f"{kind}_{model.replace(' ', '_')}"
            for part, value in fit.coefficients.items():
                unit = "ms" if part in ("constant", "new") else "ms_per_1000"
                figures[f"{name}_{part}_{unit}"] = value * (1e3 if unit == "ms" else 1e6)
            figures[f"{name}_r2"] = fit.r2
            figures[f"{name}_error_p50"] = fit.error
    return figures


def verdict(grids: Grids) -> str:
    """Return in words whether the ranks wait for each other, and what lone engines share."""
    ranks, lone = fits(observed(grids["ranks"])), fits(observed(grids["lone"]))
    differ, alone = disagreement(grids["ranks"]), disagreement(grids["lone"])
    wait = ranks["max and mean"].error < ranks["own"].error
    return "\n".join(
        [
            f"- Ranks of a group {'step' if differ < _TOGETHER else 'do NOT step'} together: "
            f"unequally loaded, their steps differ by {differ:.1%}, those of lone engines by "
            f"{alone:.0%}.",
            f"- Ranks go by {'the fullest of them' if wait else 'their OWN load'}. By greatest and "
            f"mean load: {_said(ranks['max and mean'])}. By their own: {_said(ranks['own'])}.",
            f"- The simulator's model behind a barrier: {_said(ranks['simulator'])}.",
            f"- Lone engines: {_said(lone['own and other'])}. What the other's load costs here, "
            "the cores share.",
        ]
    )


def _said(fit: Fit) -> str:
    parts = [
        f"{1e3 * value:.2f} ms{_UNITS[name]}"
        if name in ("constant", "new")
        else f"{1e6 * value:.2f} ms per 1,000 tokens {_UNITS[name]}"
        for name, value in fit.coefficients.items()
    ]
    return f"{' + '.join(parts)} (R² {fit.r2:.3f}, error {fit.error:.1%})"


def routing_figures(rounds: Rounds) -> dict[str, float]:
    figures: dict[str, float] = {}
    for arm, by_round in rounds.items():
        for name in next(iter(by_round.values())):
            mean = mean_of(_column(by_round, name))
            figures |= {f"{arm}_{name}": mean.mean, f"{arm}_{name}_half": mean.half}
    for arm, other in _pairs(rounds):
        for name in next(iter(rounds[arm].values())):
            ratio = ratio_of(_column(rounds[arm], name), _column(rounds[other], name))
            for part, value in ratio._asdict().items():
                figures[f"{arm}_over_{other}_{name}_{part}"] = value
    return figures


def routing_table(rounds: Rounds) -> str:
    rows = []
    for arm, by_round in rounds.items():
        cells = []
        for name, times, form in SHOWN.values():
            one = mean_of(_column(by_round, name))
            cells.append(f"{times * one.mean:{form}} ± {times * one.half:{form}}")
        rows.append([arm, *cells])
    for arm, other in _pairs(rounds):
        ratios = [
            ratio_of(_column(rounds[arm], name), _column(rounds[other], name))
            for name, _, _ in SHOWN.values()
        ]
        rows.append([f"{arm} / {other}", *map(str, ratios)])
    return "\n".join(markdown_table(["", *SHOWN], rows))


def _pairs(rounds: Rounds) -> list[tuple[str, str]]:
    return [(arm, other) for other, arm in combinations(rounds, 2)]


def draw(grids: Grids, png: Path) -> None:
    """Draw every engine's step over its own load, of ranks and of lone engines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles: dict[Kind, str] = {"ranks": "ranks of one group", "lone": "independent engines"}
    figure, panels = pyplot.subplots(1, len(grids), figsize=(8, 3.4), sharey=True, squeeze=False)
    for panel, (kind, points) in zip(panels[0], grids.items(), strict=True):
        seen = observed(points)
        own, other = seen.context.T / 1e3
        drawn = panel.scatter(own, 1e3 * seen.seconds, c=other, cmap="viridis", s=24)
        panel.set(title=titles[kind], xlabel="own context, 1,000 tokens", ylim=(0, None))
    panels[0][0].set_ylabel("step, ms")
    figure.colorbar(drawn, ax=panels[0], label="the other's context")
    figure.savefig(png, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def _column(by_round: Mapping[int, Mapping[str, float]], name: str) -> dict[int, float]:
    return {number: figures[name] for number, figures in by_round.items()}
