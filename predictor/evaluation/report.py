"""The evaluation as a Markdown report."""

from collections.abc import Callable, Mapping
from pathlib import Path

from predictor.evaluation.result import (
    LABELS,
    OWN_NAME,
    AgeScores,
    Evaluation,
    MethodResult,
)
from predictor.evaluation.survival_metrics import LEVELS, WITHIN, BinnedError

__all__ = ["markdown_report"]


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
    by_age = {name: result.by_generated for name, result in methods.items()}
    lines += _by_age("MAE", by_age, lambda age: f"{age.mae:.1f}")
    lines += _by_age("integrated Brier score", by_age, lambda age: f"{age.scores.ibs:.3f}")
    lines += _by_age("AUC of “ends within 80 tokens”", by_age, _auc_80)
    lines += _by_age("concordance", by_age, lambda age: _optional(age.scores.concordance))
    lines += _by_age("coverage of the 80% interval", by_age, _coverage_80)
    lines += _by_total({name: result.by_total for name, result in methods.items()})
    if evaluation.notes:
        lines += ["", "## Notes", ""] + [f"- {note}" for note in evaluation.notes]
    lines += ["", *(f"![{path.stem}]({path.name})" for path in figures), ""]
    return "\n".join(lines)


def _errors(methods: Mapping[str, MethodResult]) -> list[str]:
    best = min(methods.values(), key=lambda result: result.errors.mae)
    lines = [
        "| method | MAE | median AE | P90 AE | MAE of the mean | MAE, ended by itself "
        "| parameters | training | latency, batch 1 | batch 10 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, result in methods.items():
        mae = f"{result.errors.mae:.1f}"
        lines.append(
            f"| {LABELS[name]} | {f'**{mae}**' if result is best else mae} "
            f"| {result.errors.median_ae:.1f} | {result.errors.p90_ae:.1f} "
            f"| {result.mae_mean:.1f} | {result.mae_ended:.1f} "
            f"| {_count(result.parameters)} | {result.training_seconds:.0f} s "
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


def _by_age(
    what: str, methods: Mapping[str, list[AgeScores]], cell: Callable[[AgeScores], str]
) -> list[str]:
    ages = next(iter(methods.values()))
    rows = {
        name: [cell(age) for age in found]
        for name, found in methods.items()
        if any(cell(age) != "–" for age in found)
    }
    return _binned(f"{what} by tokens already generated", ages, rows)


def _by_total(methods: Mapping[str, list[BinnedError]]) -> list[str]:
    rows = {name: [f"{bin.mae:.1f}" for bin in found] for name, found in methods.items()}
    return _binned("MAE by length of the answer", next(iter(methods.values())), rows)


def _binned(
    title: str, bins: list[AgeScores] | list[BinnedError], rows: Mapping[str, list[str]]
) -> list[str]:
    head = " | ".join(f"{bin.low}–{bin.high - 1}" for bin in bins)
    lines = ["", f"## {title}", "", f"| tokens | {head} |", "|---|" + "---:|" * len(bins)]
    lines.append("| rows | " + " | ".join(str(bin.rows) for bin in bins) + " |")
    for name, cells in rows.items():
        lines.append(f"| {LABELS[name]} | " + " | ".join(cells) + " |")
    return lines


def _auc_80(age: AgeScores) -> str:
    return _optional(age.scores.auc_within["80"])


def _coverage_80(age: AgeScores) -> str:
    return f"{age.scores.coverage['80']:.1%}" if age.scores.coverage else "–"


def _optional(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _count(parameters: int) -> str:
    if parameters >= 1e6:
        return f"{parameters / 1e6:.1f} M"
    return str(parameters)
