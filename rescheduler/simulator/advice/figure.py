"""The picture of `headway advise`: gains by router, and gain against the quality of forecasts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rescheduler.simulator.advice.cases import Case
from rescheduler.simulator.advice.verdicts import Gain, Quality
from rescheduler.simulator.results.figures import COLOURS, finish_axes

__all__ = ["draw_advice"]


def draw_advice(
    gains: Mapping[str, Mapping[str, Gain]], cases: Sequence[Case], quality: Quality | None
) -> Any:
    """Return the figure.

    Args:
        gains: scenario -> case's key -> gain over the first case; at most four scenarios.
        cases: all routers.
        quality: of forecasts, if that was simulated.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0 if quality else 6.0, 4.2), layout="constrained")
    panels = figure.subplots(1, 2 if quality else 1, squeeze=False)[0]
    shown = cases[1:]
    rows = np.arange(len(shown))
    for i, (scenario, by_case) in enumerate(gains.items()):
        offset = 0.16 * (i - (len(gains) - 1) / 2)
        mean, half = _percent([by_case[case.key] for case in shown])
        panels[0].errorbar(
            mean,
            rows + offset,
            xerr=half,
            fmt="o",
            color=COLOURS[i],
            markersize=4.5,
            capsize=2.5,
            label=scenario,
        )
    panels[0].axvline(0.0, color="0.5", linewidth=0.8)
    panels[0].set_yticks(rows, [case.title for case in shown])
    panels[0].set_ylim(len(shown) - 0.5, -0.5)
    panels[0].legend(frameon=False, fontsize="small")
    finish_axes(panels[0], f"gain over {cases[0].title}, %")
    if quality is not None:
        _draw_quality(panels[1], quality)
    return figure


def _draw_quality(axes: Any, quality: Quality) -> None:
    noisy = {float(t.split()[1]): g for t, g in quality.gains.items() if t.startswith("σ")}
    mean, half = _percent(list(noisy.values()))
    axes.errorbar(list(noisy), mean, yerr=half, fmt="o-", color=COLOURS[0], capsize=3)
    binned = {title: g for title, g in quality.gains.items() if title.endswith("bins")}
    last = max(noisy)
    for i, (title, value) in enumerate(binned.items()):
        at = last + 0.4 * (i + 1)
        m, h = _percent([value])
        axes.errorbar([at], m, yerr=h, fmt="s", color=COLOURS[2], capsize=3)
        axes.annotate(title, (at, m[0]), (0, 8), textcoords="offset points", ha="center", size=8)
    m, h = _percent([quality.gains["real"]])
    axes.errorbar([quality.sigma], m, yerr=h, fmt="D", color=COLOURS[1], capsize=3, label="real")
    axes.axhline(0.0, color="0.5", linewidth=0.8)
    axes.set_xticks(list(noisy), [f"{sigma:g}" for sigma in noisy], fontsize="small")
    axes.set_title(quality.scenario.key, loc="left", fontsize="medium")
    axes.legend(frameon=False, fontsize="small")
    finish_axes(
        axes,
        "σ, spread of the forecasts' log error; right: STAR's bins",
        f"gain over {quality.blind.title}, %",
    )


def _percent(gains: Sequence[Gain]) -> tuple[list[float], list[float]]:
    half = np.nan_to_num([100 * value.half for value in gains])
    return [100 * value.mean for value in gains], half.tolist()
