"""What an evaluation found, for the report, the figures and the JSON document."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from predictor.evaluation.survival_metrics import BinnedError, ErrorSummary, SurvivalScores

__all__ = ["LABELS", "OWN_NAME", "AgeScores", "Calibration", "Evaluation", "MethodResult"]

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
class AgeScores:
    """A method's scores on the rows with low ≤ generated tokens < high."""

    low: int
    high: int
    rows: int
    mae: float
    scores: SurvivalScores


@dataclass(frozen=True)
class MethodResult:
    """What one method does on the test rows.

    Attributes:
        errors: of the forecast's median, over all rows.
        mae_ended: MAE of the median over the rows of requests that ended by themselves.
        mae_mean: MAE of the forecast's mean, over all rows.
        scores: survival measures over all rows.
        parameters: of the model that predicts.
        training_seconds: time to train it; 0 when there is nothing to train.
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
    by_total: list[BinnedError]


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
        own: the predictor's result.
        comparators: by name.
        calibration: the predictor's; None for a regressor.
        n_requests: requests in the test rows.
        n_rows: test rows.
        cut_rows: those of requests that their ``max_tokens`` ended.
        left_out_rows: rows of requests that were cut otherwise.
        provenance: dataset, model, commit, machine, versions.
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
