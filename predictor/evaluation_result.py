"""What an evaluation found, for the report, the figures and the JSON document."""

from dataclasses import asdict, dataclass, field
from typing import Any

from predictor.metrics import BinnedError, ErrorSummary

__all__ = ["OWN_NAME", "Evaluation", "MethodResult"]

OWN_NAME = "headway"
"""The predictor's own name in tables and figures."""


@dataclass(frozen=True)
class MethodResult:
    """What one method does on the test rows.

    Attributes:
        errors: overall.
        parameters: of the model that predicts.
        training_seconds: time to train it here; 0 when there is nothing to train.
        latency_ms_batch1: median time of one prediction for one request, one CPU core.
        latency_ms_batch10: the same for ten requests at once.
        by_generated: MAE by tokens already generated.
        by_total: MAE by the request's true length.
    """

    errors: ErrorSummary
    parameters: int
    training_seconds: float
    latency_ms_batch1: float
    latency_ms_batch10: float
    by_generated: list[BinnedError]
    by_total: list[BinnedError]


@dataclass(frozen=True)
class Evaluation:
    """A predictor beside its comparators.

    Attributes:
        own: the predictor's result.
        comparators: by name.
        n_requests: requests in the test rows.
        n_rows: test rows.
        censored_rows: test rows left out because their request was cut.
        provenance: dataset, model, commit, machine, versions.
        notes: what a reader must know, such as subsamples.
    """

    own: MethodResult
    comparators: dict[str, MethodResult]
    n_requests: int
    n_rows: int
    censored_rows: int
    provenance: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the JSON document: the predictor's figures, then the comparators'."""
        return {
            **_flat(self.own),
            "n_requests": self.n_requests,
            "n_rows": self.n_rows,
            "censored_rows_left_out": self.censored_rows,
            "comparators": {name: _flat(result) for name, result in self.comparators.items()},
            "notes": self.notes,
            "provenance": self.provenance,
        }


def _flat(result: MethodResult) -> dict[str, Any]:
    flat = asdict(result)
    return {**flat.pop("errors"), **flat}
