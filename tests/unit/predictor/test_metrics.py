import numpy as np
import pytest

from predictor.evaluation.survival_metrics import error_by_bin, summarise_errors


def test_summary_of_known_errors() -> None:
    remaining = np.array([10, 20, 30, 40, 50])
    predicted = np.array([10.0, 22.0, 26.0, 40.0, 60.0])  # errors 0, 2, 4, 0, 10
    summary = summarise_errors(predicted, remaining)
    assert summary.mae == pytest.approx(3.2)
    assert summary.median_ae == pytest.approx(2.0)
    assert summary.p90_ae == pytest.approx(7.6)


def test_bins_are_half_open_and_empty_ones_left_out() -> None:
    remaining = np.array([5, 5, 5])
    bins = error_by_bin(np.array([5.0, 6.0, 9.0]), remaining, np.array([0, 9, 20]), [0, 10, 20, 30])
    assert [(b.low, b.high, b.rows, b.mae) for b in bins] == [(0, 10, 2, 0.5), (20, 30, 1, 4.0)]


@pytest.mark.parametrize(
    ("predicted", "message"),
    [(np.array([]), "predictions for"), (np.array([np.nan]), "not finite")],
)
def test_bad_predictions_are_refused(predicted: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        summarise_errors(predicted, np.arange(len(predicted)))
