"""The evaluation's figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data_collection.atomic_file import replace_file
from predictor.evaluation.report import (
    BY_AGE,
    LABELS,
    OWN_NAME,
    Calibration,
    Evaluation,
    MethodResult,
)

__all__ = ["draw_figures"]

_OWN_COLOUR = "#d1495b"


def draw_figures(
    evaluation: Evaluation,
    remaining: npt.NDArray[np.int64],
    predicted: npt.NDArray[Any],
    folder: Path,
) -> list[Path]:
    """Draw errors and scores along a request's life, predictions and calibration.

    Args:
        evaluation: what was found.
        remaining: [n_rows] tokens that came.
        predicted: [n_rows] the predictor's own medians.
        folder: where the PNG files go, whose paths are returned.
    """
    methods = {OWN_NAME: evaluation.own, **evaluation.comparators}
    figures = {
        "mae": _errors(methods),
        "by_age": _by_age(methods),
        "predicted_against_true": _truth(remaining, predicted),
    }
    if evaluation.calibration:
        figures["calibration"] = _calibration(evaluation.calibration)
    paths = []
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        with replace_file(path) as temporary:
            figure.savefig(temporary, dpi=150, format="png")
        paths.append(path)
    return paths


def _errors(methods: Mapping[str, MethodResult]) -> Figure:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    ages, totals = figure.add_subplot(121), figure.add_subplot(122)
    for name, result in methods.items():
        _line(ages, name, result.by_generated, [age.mae for age in result.by_generated])
        _line(totals, name, result.by_total, [bin.mae for bin in result.by_total])
    _finish(ages, "tokens already generated", "MAE, tokens")
    _finish(totals, "length of the answer, tokens", "MAE, tokens")
    for axes in (ages, totals):
        axes.set_ylim(bottom=0)
    ages.legend(frameon=False, fontsize="small")
    figure.suptitle("Error of the forecast median on the test split")
    return figure


def _by_age(methods: Mapping[str, MethodResult]) -> Any:
    _, brier, auc, _, coverage = BY_AGE
    figure = Figure(figsize=(13, 4), layout="constrained")
    for i, (title, value, _form) in enumerate((brier, auc, coverage)):
        axes = figure.add_subplot(1, 3, i + 1)
        for name, result in methods.items():
            values = [value(age) for age in result.by_generated]
            if any(v is not None for v in values):
                shown = [np.nan if v is None else v for v in values]
                _line(axes, name, result.by_generated, shown)
        if title == coverage.title:
            axes.axhline(0.8, color="0.5", linewidth=1, linestyle="--")
            axes.set_ylim(0, 1)
        _finish(axes, "tokens already generated", title)
    figure.axes[0].legend(frameon=False, fontsize="small")
    return figure


def _truth(remaining: npt.NDArray[np.int64], predicted: npt.NDArray[Any]) -> Figure:
    figure = Figure(figsize=(5, 4.6), layout="constrained")
    axes = figure.add_subplot()
    limit = float(max(remaining.max(), predicted.max()))
    image = axes.hexbin(
        remaining, predicted, gridsize=45, extent=(0, limit, 0, limit), bins="log", cmap="magma_r"
    )
    axes.plot([0, limit], [0, limit], color="0.4", linewidth=1)
    axes.set_xlabel("remaining tokens that came")
    axes.set_ylabel("forecast median, tokens")
    axes.set_title(f"{len(remaining)} test rows")
    figure.colorbar(image, label="rows")
    return figure


def _calibration(found: Calibration) -> Figure:
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    axes = figure.add_subplot(121)
    axes.plot([0, 1], [0, 1], color="0.5", linewidth=1)
    axes.plot(found.nominal, found.observed_raw, color="0.6", label="as learned")
    axes.plot(found.nominal, found.observed, color=_OWN_COLOUR, linewidth=2, label="recalibrated")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.legend(frameon=False)
    _finish(axes, "forecast P(R ≤ h)", "share of ends that came within h")
    bars = figure.add_subplot(122)
    tenths = np.arange(len(found.d_shares)) * 10 + 5
    bars.bar(tenths, np.array(found.d_shares) * 100, width=9, color=_OWN_COLOUR, alpha=0.8)
    bars.axhline(100 / len(found.d_shares), color="0.4", linewidth=1)
    bars.set_title(f"at the end of prefill; chi-squared p = {found.d_p_value:.3f}")
    _finish(bars, "percentile of the forecast at which the request ended", "requests, %")
    return figure


def _line(axes: Axes, name: str, bins: Any, values: list[float]) -> None:
    own = name == OWN_NAME
    axes.plot(
        [(bin.low + bin.high) / 2 for bin in bins],
        values,
        marker="o" if own else ".",
        linewidth=2.5 if own else 1.2,
        color=_OWN_COLOUR if own else None,
        zorder=3 if own else 2,
        label=LABELS[name],
    )


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
