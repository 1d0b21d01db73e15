"""What an evaluation found: as JSON, and as a Markdown report."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data_collection.files import replace_file
from predictor.evaluation.survival_metrics import (
    LEVELS,
    WITHIN,
    ErrorBin,
    ErrorSummary,
    SurvivalScores,
)

OWN_NAME = "headway"
"""The predictor's own name among the methods."""

LABELS = {
    OWN_NAME: "This predictor",
    "regressor": "STAR regressor, cut rows left out",
    "regressor_cut_as_ended": "STAR regressor, cut rows as ended",
    "constant_median": "Constant median",
    "kaplan_meier": "Kaplan–Meier by age",
    "prompt_self_report": "Self-report (PiA)",
    "auxiliary_encoder": "Auxiliary encoder (μ-Serve)",
    "auxiliary_causal_lm": "Auxiliary LM (TetriInfer)",
}
"""What methods are called in tables and figures."""


@dataclass(frozen=True)
class AgeScores(ErrorBin):
    """A method's scores on the rows with low ≤ generated tokens < high."""

    scores: SurvivalScores


class AgeMeasure(NamedTuple):
    """A measure along a request's life: its title, its value where it has one, how it is shown."""

    title: str
    value: Callable[[AgeScores], float | None]
    form: str


BY_AGE = (
    AgeMeasure("MAE", lambda age: age.mae, ".1f"),
    AgeMeasure("integrated Brier score", lambda age: age.scores.ibs, ".3f"),
    AgeMeasure("AUC of “ends within 80 tokens”", lambda age: age.scores.auc_within["80"], ".3f"),
    AgeMeasure("concordance", lambda age: age.scores.concordance, ".3f"),
    AgeMeasure(
        "coverage of the 80% interval", lambda age: (age.scores.coverage or {}).get("80"), ".1%"
    ),
)


@dataclass(frozen=True)
class MethodResult:
    """What one method does on the test rows.

    Attributes:
        errors: of the forecast's median, over all rows.
        mae_ended: MAE of the median over the rows of requests that ended by themselves.
        mae_mean: MAE of the forecast's mean, over all rows.
        latency_ms_batch1: median time of one prediction for one request, one CPU core.
        latency_ms_batch10: the same for ten requests at once.
        by_generated: errors and scores by tokens already generated.
        by_total: MAE by what the request generated in the end.
    """

    errors: ErrorSummary
    mae_ended: float
    mae_mean: float
    scores: SurvivalScores
    parameters: int
    training_seconds: float
    latency_ms_batch1: float
    latency_ms_batch10: float
    by_generated: list[AgeScores]
    by_total: list[ErrorBin]


@dataclass(frozen=True)
class Calibration:
    """How the levels u = P(R ≤ r) of the ends are spread; evenly when calibrated.

    Attributes:
        d_shares: share of requests by decile of u, at the end of their prefill.
        d_p_value: chi-squared test of evenness over those requests, which are independent.
        nominal: levels at which the observed share was looked up.
        observed: share of rows with u at most that.
        observed_raw: the same before the recalibration.
    """

    d_shares: list[float]
    d_p_value: float
    nominal: list[float]
    observed: list[float]
    observed_raw: list[float]


@dataclass(frozen=True)
class Evaluation:
    """A predictor beside its comparators.

    Attributes:
        calibration: the predictor's own; None for a regressor.
        cut_rows: those of requests that their ``max_tokens`` ended.
        left_out_rows: rows of requests that were cut otherwise.
        notes: what a reader must know, such as subsamples.
    """

    own: MethodResult
    comparators: dict[str, MethodResult]
    calibration: Calibration | None
    n_requests: int
    n_rows: int
    cut_rows: int
    left_out_rows: int
    provenance: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the JSON document: headline figures, the predictor's own, the comparators'."""
        regressors = [r for name, r in self.comparators.items() if name.startswith("regressor")]
        kaplan_meier = self.comparators.get("kaplan_meier")
        document = {
            "mae_median": self.own.errors.mae,
            "mae_regressor": min((r.errors.mae for r in regressors), default=None),
            "ibs": self.own.scores.ibs,
            "ibs_kaplan_meier": kaplan_meier.scores.ibs if kaplan_meier else None,
            "coverage": self.own.scores.coverage,
            "auc_within": self.own.scores.auc_within,
            **_flat(self.own),
            "calibration": asdict(self.calibration) if self.calibration else None,
            "n_requests": self.n_requests,
            "n_rows": self.n_rows,
            "rows_cut_at_max_tokens": self.cut_rows,
            "rows_left_out": self.left_out_rows,
            "comparators": {name: _flat(result) for name, result in self.comparators.items()},
            "notes": self.notes,
            "provenance": self.provenance,
        }
        known: dict[str, Any] = _nan_as_none(document)
        return known


def _nan_as_none(value: Any) -> Any:
    """Write what no row was there to measure as null: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _nan_as_none(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_nan_as_none(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _flat(result: MethodResult) -> dict[str, Any]:
    flat = asdict(result)
    by_generated = [{**bin.pop("scores"), **bin} for bin in flat.pop("by_generated")]
    return {**flat.pop("errors"), **flat.pop("scores"), **flat, "by_generated": by_generated}


def markdown_report(evaluation: Evaluation, figures: list[Path]) -> str:
    """Return the report: errors, survival measures, both along a request's life, the figures."""
    methods = {OWN_NAME: evaluation.own, **evaluation.comparators}
    lines = [
        f"# Remaining-length forecasts for {evaluation.provenance['model']}",
        "",
        f"{evaluation.n_rows} {evaluation.provenance['part']} rows of {evaluation.n_requests} "
        f"requests that no method trained on, {evaluation.cut_rows} of them of requests that their "
        f"max_tokens ended; {evaluation.left_out_rows} rows of requests cut otherwise are left "
        "out. The truth is "
        "the tokens that came, and every forecast knows the cap. Errors are in tokens, of the "
        "forecast's median; latency on one core.",
        "",
        *_errors(methods),
        *_gain(evaluation),
        *_survival(methods),
        *_calibration(evaluation),
    ]
    for measure in BY_AGE:
        lines += _by_age(measure, methods)
    lines += _by_total(methods)
    if evaluation.notes:
        lines += ["", "## Notes", ""] + [f"- {note}" for note in evaluation.notes]
    lines += ["", *(f"![{path.stem}]({path.name})" for path in figures), ""]
    return "\n".join(lines)


def _errors(methods: Mapping[str, MethodResult]) -> list[str]:
    best = min(methods.values(), key=lambda result: result.errors.mae)
    lines = [
        "| method | MAE | median AE | P90 AE | MAE of the mean | MAE, ended by itself "
        "| parameters | training | latency, batch 1 | batch 10 |",
        "|---|" + "---:|" * 9,
    ]
    for name, result in methods.items():
        mae, parameters = f"{result.errors.mae:.1f}", result.parameters
        count = f"{parameters / 1e6:.1f} M" if parameters >= 1e6 else parameters
        lines.append(
            f"| {LABELS[name]} | {f'**{mae}**' if result is best else mae} "
            f"| {result.errors.median_ae:.1f} | {result.errors.p90_ae:.1f} "
            f"| {result.mae_mean:.1f} | {result.mae_ended:.1f} "
            f"| {count} | {result.training_seconds:.0f} s "
            f"| {result.latency_ms_batch1:.2f} ms | {result.latency_ms_batch10:.2f} ms |"
        )
    return lines


def _gain(evaluation: Evaluation) -> list[str]:
    if not evaluation.comparators:
        return []
    name, rival = min(evaluation.comparators.items(), key=lambda item: item[1].errors.mae)
    change = 1 - evaluation.own.errors.mae / rival.errors.mae
    compared = f"{abs(change):.1%} {'lower' if change >= 0 else 'higher'} than"
    lines = ["", f"MAE {compared} the best comparator's, {LABELS[name]}."]
    if kaplan_meier := evaluation.comparators.get("kaplan_meier"):
        change = 1 - evaluation.own.scores.ibs / kaplan_meier.scores.ibs
        compared = f"{abs(change):.1%} {'below' if change >= 0 else 'above'}"
        lines[-1] += f" Integrated Brier score {compared} {LABELS['kaplan_meier']}."
    return lines


def _survival(methods: Mapping[str, MethodResult]) -> list[str]:
    heads = [f"AUC within {h}" for h in WITHIN] + [f"Brier within {h}" for h in WITHIN]
    heads += [f"{level}% covers" for level in LEVELS]
    lines = [
        "",
        "## As survival forecasts",
        "",
        f"| method | integrated Brier | concordance | pinball | {' | '.join(heads)} |",
        "|---|" + "---:|" * (3 + len(heads)),
    ]
    for name, result in methods.items():
        scores = result.scores
        cells = [f"{scores.ibs:.4f}", _optional(scores.concordance), f"{scores.pinball:.1f}"]
        cells += [_optional(scores.auc_within[str(h)]) for h in WITHIN]
        cells += [f"{scores.brier_within[str(h)]:.3f}" for h in WITHIN]
        covered = scores.coverage
        cells += [f"{covered[str(level)]:.1%}" if covered else "–" for level in LEVELS]
        lines.append(f"| {LABELS[name]} | {' | '.join(cells)} |")
    lines += [
        "",
        "“Within h” asks whether the request ends within h tokens, on rows that may still "
        "generate more than h. A point forecast is a step curve.",
    ]
    return lines


def _calibration(evaluation: Evaluation) -> list[str]:
    found = evaluation.calibration
    if found is None:
        return []
    shares = " | ".join(f"{share:.1%}" for share in found.d_shares)
    return [
        "",
        "## Calibration",
        "",
        "Share of requests whose end fell into each tenth of its forecast, at the end of their "
        f"prefill (10% each when calibrated; chi-squared test p = {found.d_p_value:.3f}):",
        "",
        "| " + " | ".join(f"{i * 10}–{i * 10 + 10}%" for i in range(len(found.d_shares))) + " |",
        "|" + "---:|" * len(found.d_shares),
        f"| {shares} |",
    ]


def _by_age(measure: AgeMeasure, methods: Mapping[str, MethodResult]) -> list[str]:
    rows = {}
    for name, result in methods.items():
        values = [measure.value(age) for age in result.by_generated]
        if any(value is not None for value in values):
            rows[name] = [_optional(value, measure.form) for value in values]
    ages = next(iter(methods.values())).by_generated
    return _binned(f"{measure.title} by tokens already generated", ages, rows)


def _by_total(methods: Mapping[str, MethodResult]) -> list[str]:
    rows = {name: [f"{bin.mae:.1f}" for bin in found.by_total] for name, found in methods.items()}
    return _binned("MAE by length of the answer", next(iter(methods.values())).by_total, rows)


def _binned(title: str, bins: Sequence[ErrorBin], rows: Mapping[str, list[str]]) -> list[str]:
    head = " | ".join(f"{bin.low}–{bin.high - 1}" for bin in bins)
    lines = ["", f"## {title}", "", f"| tokens | {head} |", "|---|" + "---:|" * len(bins)]
    lines.append("| rows | " + " | ".join(str(bin.rows) for bin in bins) + " |")
    return lines + [f"| {LABELS[name]} | {' | '.join(cells)} |" for name, cells in rows.items()]


def _optional(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else format(value, form)


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
        "mae": _errors_figure(methods),
        "by_age": _by_age_figure(methods),
        "predicted_against_true": _truth(remaining, predicted),
    }
    if evaluation.calibration:
        figures["calibration"] = _calibration_figure(evaluation.calibration)
    paths = []
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        with replace_file(path) as temporary:
            figure.savefig(temporary, dpi=150, format="png")
        paths.append(path)
    return paths


def _errors_figure(methods: Mapping[str, MethodResult]) -> Figure:
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


def _by_age_figure(methods: Mapping[str, MethodResult]) -> Any:
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


def _calibration_figure(found: Calibration) -> Figure:
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
