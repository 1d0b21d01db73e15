"""What the age of a request alone says about its remaining length, cut requests included."""

import numpy as np
import numpy.typing as npt

from predictor.evaluation.comparators.comparator import fitted, request_lengths
from predictor.forecasts.forecast import SurvivalForecast
from predictor.forecasts.kaplan_meier import KaplanMeierCurve
from predictor.training.row_table import RowTable

__all__ = ["KaplanMeier"]


class KaplanMeier:
    r"""Forecast the remaining tokens given only the tokens generated so far.

    .. math:: S(h \mid n) = \hat S(n + h) / \hat S(n)

    with :math:`\hat S` the Kaplan-Meier curve of total lengths, one observation a training
    request, cut ones as cut. Paper "BalanceRoute" weighs its projections with it. What a
    predictor gains over this is what it reads in the request; what it gains over
    `ConstantMedian` already uses what age alone reveals.
    """

    name = "kaplan_meier"

    def __init__(self) -> None:
        self._curve: KaplanMeierCurve | None = None

    @property
    def parameters(self) -> int:
        """Steps of the curve; 0 before ``fit``."""
        return 0 if self._curve is None else len(self._curve.times)

    @property
    def notes(self) -> list[str]:
        """What a reader of its figures must know."""
        return [
            f"{self.name}: counts cut requests as long, as it should, so on the rows of requests "
            "that ended by themselves it errs on the long side"
        ]

    def fit(self, train: RowTable, validation: RowTable) -> None:
        """Estimate the curve from the requests of the training rows.

        Raises:
            ValueError: there are no training rows.
        """
        self._curve = KaplanMeierCurve.estimate(*request_lengths(train))

    def forecast(self, rows: RowTable) -> SurvivalForecast:
        """Return the curve given each row's age, capped by its ``max_tokens``.

        Where the training requests were cut the curve stays flat to the cap.

        Raises:
            RuntimeError: ``fit`` was not called.
        """
        curve = fitted(self._curve, self.name)
        left = rows.tokens_left()
        longest = int(curve.last_observed)
        end = max(longest + 1, int((rows.generated_tokens + left).max()) + 1)
        edges = np.append(np.arange(longest + 1), end)
        survival = np.broadcast_to(curve.at(edges), (len(rows), len(edges)))
        fresh = SurvivalForecast(edges, survival, np.zeros(len(rows)), np.full(len(rows), np.inf))
        return fresh.aged(rows.generated_tokens).capped(left)

    def predict(self, rows: RowTable) -> npt.NDArray[np.float32]:
        """Return the age's median remaining tokens, [n_rows].

        Raises:
            RuntimeError: ``fit`` was not called.
        """
        return np.ceil(self.forecast(rows).median()).astype(np.float32)
