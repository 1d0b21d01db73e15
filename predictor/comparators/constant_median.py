"""The floor every predictor must beat: one number for every row."""

import numpy as np
import numpy.typing as npt

from predictor.comparators.comparator import fitted
from predictor.row_table import RowTable

__all__ = ["ConstantMedian"]


class ConstantMedian:
    r"""Predict the training rows' median remaining tokens, whatever the request.

    .. math:: \hat y = \operatorname{median}_i y_i = \arg\min_c \sum_i |y_i - c|

    so no constant has a lower mean absolute error on the training rows. Censored rows are
    left out, since their remaining tokens are only a lower bound.
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
        """Take the median of the uncensored training rows.

        Raises:
            ValueError: every training row is censored, or there is none.
        """
        remaining = train.uncensored().remaining_tokens
        if len(remaining) == 0:
            raise ValueError(f"{self.name}: none of {len(train)} training rows is uncensored")
        self._median = float(np.median(remaining))

    def predict(self, rows: RowTable) -> npt.NDArray[np.float32]:
        """Return the median for every row, [n_rows] tokens.

        Raises:
            RuntimeError: ``fit`` was not called.
        """
        return np.full(len(rows), fitted(self._median, self.name), dtype=np.float32)
