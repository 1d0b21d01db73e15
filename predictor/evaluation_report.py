"""The evaluation as a Markdown table and as figures."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_collection.atomic_file import replace_file
from predictor.evaluation_result import OWN_NAME, Evaluation, MethodResult
from predictor.metrics import BinnedError

__all__ = ["draw_figures", "markdown_report"]

LABELS = {
    OWN_NAME: "Headway (hidden state)",
    "constant_median": "Constant median",
    "kaplan_meier": "Kaplan–Meier by age",
    "prompt_self_report": "Self-report (PiA)",
    "auxiliary_encoder": "Auxiliary encoder (μ-Serve)",
    "auxiliary_causal_lm": "Auxiliary LM (TetriInfer)",
}


def markdown_report(evaluation: Evaluation, figures: list[Path]) -> str:
    """Return the report: the paper's Table 1, errors along a request's life, the figures."""
    methods = {OWN_NAME: evaluation.own, **evaluation.comparators}
    best = min(methods.values(), key=lambda result: result.errors.mae)
    lines = [
        f"# Remaining-length prediction for {evaluation.provenance['model']}",
        "",
        f"{evaluation.n_rows} test rows of {evaluation.n_requests} requests that no method "
        f"trained on; {evaluation.censored_rows} rows of cut requests are left out. Errors are "
        "in tokens; latency on one core.",
        "",
        "| method | MAE | median AE | P90 AE | parameters | training | latency, batch 1 "
        "| batch 10 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, result in methods.items():
        mae = f"{result.errors.mae:.1f}"
        lines.append(
            f"| {LABELS[name]} | {f'**{mae}**' if result is best else mae} "
            f"| {result.errors.median_ae:.1f} | {result.errors.p90_ae:.1f} "
            f"| {_count(result.parameters)} | {result.training_seconds:.0f} s "
            f"| {result.latency_ms_batch1:.2f} ms | {result.latency_ms_batch10:.2f} ms |"
        )
    if evaluation.comparators:
        rival = min(evaluation.comparators.items(), key=lambda item: item[1].errors.mae)
        change = 1 - evaluation.own.errors.mae / rival[1].errors.mae
        compared = f"{abs(change):.1%} {'lower' if change >= 0 else 'higher'} than"
        lines += ["", f"MAE {compared} the best comparator's, {LABELS[rival[0]]}."]
    lines += _binned("tokens already generated", {n: m.by_generated for n, m in methods.items()})
    lines += _binned("true length", {n: m.by_total for n, m in methods.items()})
    if evaluation.notes:
        lines += ["", "## Notes", ""] + [f"- {note}" for note in evaluation.notes]
    lines += ["", *(f"![{path.stem}]({path.name})" for path in figures), ""]
    return "\n".join(lines)


def draw_figures(
    methods: Mapping[str, MethodResult],
    remaining: npt.NDArray[np.int64],
    predicted: npt.NDArray[np.float32],
    folder: Path,
) -> list[Path]:
    """Draw the MAE along a request's life, and the predictions against the truth.

    Args:
        methods: results by name.
        remaining: [n_rows] true remaining tokens.
        predicted: [n_rows] the predictor's own predictions.
        folder: where the PNG files go.

    Returns:
        Their paths.
    """
    from matplotlib.figure import Figure

    errors = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, bins, title in (
        (errors.add_subplot(121), "by_generated", "tokens already generated"),
        (errors.add_subplot(122), "by_total", "true length of the answer, tokens"),
    ):
        for name, result in methods.items():
            found: list[BinnedError] = getattr(result, bins)
            middles = [(b.low + b.high) / 2 for b in found]
            own = name == OWN_NAME
            axes.plot(
                middles,
                [b.mae for b in found],
                marker="o" if own else ".",
                linewidth=2.5 if own else 1.2,
                color="#d1495b" if own else None,
                zorder=3 if own else 2,
                label=LABELS[name],
            )
        axes.set_xlabel(title)
        axes.set_ylabel("MAE, tokens")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    errors.axes[0].legend(frameon=False, fontsize="small")
    errors.suptitle("Error of the remaining length on the test split")

    truth = Figure(figsize=(5, 4.6), layout="constrained")
    axes = truth.add_subplot()
    limit = float(max(remaining.max(), predicted.max()))
    image = axes.hexbin(
        remaining, predicted, gridsize=45, extent=(0, limit, 0, limit), bins="log", cmap="magma_r"
    )
    axes.plot([0, limit], [0, limit], color="0.4", linewidth=1)
    axes.set_xlabel("true remaining tokens")
    axes.set_ylabel("predicted remaining tokens")
    axes.set_title(f"{LABELS[OWN_NAME]}, {len(remaining)} test rows")
    truth.colorbar(image, label="rows")

    paths = []
    for name, figure in (("mae", errors), ("predicted_against_true", truth)):
        path = folder / f"{name}.png"
        with replace_file(path) as temporary:
            figure.savefig(temporary, dpi=150, format="png")
        paths.append(path)
    return paths


def _binned(key: str, methods: Mapping[str, list[BinnedError]]) -> list[str]:
    bins = next(iter(methods.values()))
    head = " | ".join(f"{b.low}–{b.high - 1}" for b in bins)
    counts = " | ".join(str(b.rows) for b in bins)
    lines = ["", f"## MAE by {key}", "", f"| {key} | {head} |", "|---|" + "---:|" * len(bins)]
    lines.append(f"| rows | {counts} |")
    for name, found in methods.items():
        lines.append(f"| {LABELS[name]} | " + " | ".join(f"{b.mae:.1f}" for b in found) + " |")
    return lines


def _count(parameters: int) -> str:
    if parameters >= 1e6:
        return f"{parameters / 1e6:.1f} M"
    return str(parameters)
