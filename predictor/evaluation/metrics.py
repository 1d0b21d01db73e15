"""Errors of remaining-length predictions, overall and along a request's life."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BinnedError", "ErrorSummary", "error_by_bin", "summarise_errors"]

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ErrorSummary:
    """Absolute errors |ŷ - y| in tokens.

    Attributes:
        mae: their mean.
        median_ae: their median.
        p90_ae: their 90th percentile.
    """

    mae: float
    median_ae: float
    p90_ae: float


@dataclass(frozen=True)
class BinnedError:
    """Mean absolute error of the rows whose key lies in [low, high)."""

    low: int
    high: int
    rows: int
    mae: float


def summarise_errors(predicted: FloatArray, remaining: IntArray) -> ErrorSummary:
    """Return mean, median and 90th percentile of the absolute error, in tokens.

    Args:
        predicted: [n_rows] predicted remaining tokens.
        remaining: [n_rows] true remaining tokens.

    Raises:
        ValueError: the arrays are empty, differ in length or hold NaN.
    """
    errors = _absolute_errors(predicted, remaining)
    return ErrorSummary(
        mae=float(errors.mean()),
        median_ae=float(np.median(errors)),
        p90_ae=float(np.percentile(errors, 90)),
    )


def error_by_bin(
    predicted: FloatArray, remaining: IntArray, key: IntArray, edges: Sequence[int]
) -> list[BinnedError]:
    """Return the MAE by a key: tokens already generated (STAR's Figure 7), or true length.

    Args:
        predicted: [n_rows] predicted remaining tokens.
        remaining: [n_rows] true remaining tokens.
        key: [n_rows] what to bin by.
        edges: ascending; bin i is [edges[i], edges[i+1]). Empty bins are left out.
    """
    errors = _absolute_errors(predicted, remaining)
    bins = []
    for low, high in itertools.pairwise(edges):
        inside = (key >= low) & (key < high)
        if inside.any():
            bins.append(BinnedError(low, high, int(inside.sum()), float(errors[inside].mean())))
    return bins


def _absolute_errors(predicted: FloatArray, remaining: IntArray) -> FloatArray:
    if predicted.shape != remaining.shape or predicted.size == 0:
        raise ValueError(f"{predicted.shape} predictions for {remaining.shape} rows")
    errors: FloatArray = np.abs(predicted - remaining)
    if not np.isfinite(errors).all():
        raise ValueError(f"{int((~np.isfinite(errors)).sum())} predictions are not finite")
    return errors
