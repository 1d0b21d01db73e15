"""The floor every predictor must beat: one number for every row."""

import numpy as np
import numpy.typing as npt

from predictor.evaluation.comparators.comparator import fitted
from predictor.training.row_table import RowTable

__all__ = ["ConstantMedian"]


class ConstantMedian:
    r"""Predict the training rows' median remaining tokens, whatever the request.

    .. math:: \hat y = \operatorname{median}_i y_i = \arg\min_c \sum_i |y_i - c|

    so no constant has a lower mean absolute error on the training rows. Rows of requests that
    their ``max_tokens`` ended count with the tokens that came; those cut otherwise are left out.
    """

    name = "constant_median"

    def __init__(self) -> None:
        self._median: float | None = None

    @property
    def parameters(self) -> int:
        """One: the median."""
        return 1

    @property
    def notes(self) -> list[str]:
        """What a reader of its figures must know."""
        return []

    def fit(self, train: RowTable, validation: RowTable) -> None:
        """Take the median of the training rows.

        Raises:
            ValueError: no training request ran to its end.
        """
        remaining = train.ran_to_their_end().remaining_tokens
        if len(remaining) == 0:
            raise ValueError(f"{self.name}: no request of {len(train)} rows ran to its end")
        self._median = float(np.median(remaining))

    def predict(self, rows: RowTable) -> npt.NDArray[np.float32]:
        """Return the median for every row, [n_rows] tokens.

        Raises:
            RuntimeError: ``fit`` was not called.
        """
        return np.full(len(rows), fitted(self._median, self.name), dtype=np.float32)
