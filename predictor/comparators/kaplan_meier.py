"""What the age of a request alone says about its remaining length, cut requests included."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.comparators.comparator import fitted, request_lengths
from predictor.row_table import RowTable

__all__ = ["KaplanMeier", "SurvivalCurve"]


@dataclass(frozen=True, slots=True)
class SurvivalCurve:
    """A step function S(t) = P(T > t) of the total generated tokens T.

    Attributes:
        times: [n_steps] ascending lengths at which a request ended.
        survival: [n_steps] S at and after each of them; 1 before the first.
        last_observed: longest length seen, of ended or cut requests, in tokens.
    """

    times: npt.NDArray[np.int64]
    survival: npt.NDArray[np.float64]
    last_observed: int

    @classmethod
    def estimate(
        cls, total_tokens: npt.NDArray[np.int64], censored: npt.NDArray[np.bool_]
    ) -> "SurvivalCurve":
        r"""Estimate S by the product-limit formula (Kaplan and Meier, JASA 1958).

        .. math:: \hat S(t) = \prod_{t_j \le t} \left(1 - \frac{d_j}{m_j}\right)

        with :math:`d_j` requests that ended at :math:`t_j` and :math:`m_j` requests at least
        that long. A request cut at c counts in :math:`m_j` for :math:`t_j \le c` and nowhere
        else: it says that its length is more than c, not what it is.

        Args:
            total_tokens: [n_requests] generated tokens.
            censored: [n_requests] whether the request was cut at that length.

        Raises:
            ValueError: there are no requests.
        """
        if len(total_tokens) == 0:
            raise ValueError("kaplan_meier: there are no training requests")
        times, ended = np.unique(total_tokens[~censored], return_counts=True)
        shorter = np.searchsorted(np.sort(total_tokens), times, side="left")
        at_risk = len(total_tokens) - shorter
        survival = np.cumprod(1 - ended / at_risk, dtype=np.float64)
        return cls(times, survival, int(total_tokens.max()))

    def median_remaining(self, generated_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        r"""Return the median remaining tokens of requests that have lived past n.

        .. math:: \hat y(n) = \min \{ r : S(n + r) / S(n) \le 1/2 \}

        Where cut requests keep the curve above half of S(n), the median is not in the data:
        the longest observed length stands in for it, which is too short. Past that length
        the prediction is 0.

        Args:
            generated_tokens: [n_rows] n.

        Returns:
            [n_rows] tokens.
        """
        steps_before = np.searchsorted(self.times, generated_tokens, side="right")
        survived = np.concatenate([[1.0], self.survival])[steps_before]
        # Rounding in the product must not push an exact half to the next step.
        half = 0.5 * survived * (1 + 1e-9)
        step = np.searchsorted(-self.survival, -half, side="left")
        median_total = np.concatenate([self.times, [self.last_observed]])[step]
        remaining = np.maximum(median_total - generated_tokens, 0)
        return remaining.astype(np.float32)


class KaplanMeier:
    """Predict the median remaining tokens given only the tokens generated so far.

    One observation a training request, censored ones as censored. What a predictor gains over
    this is what it reads in the request; what it gains over `ConstantMedian` includes what the
    age alone tells.
    """

    name = "kaplan_meier"

    def __init__(self) -> None:
        self._curve: SurvivalCurve | None = None

    @property
    def parameters(self) -> int:
        """Steps of the curve; 0 before ``fit``."""
        return 0 if self._curve is None else len(self._curve.times)

    @property
    def notes(self) -> list[str]:
        """What a reader of its figures must know."""
        return [
            f"{self.name}: counts cut requests as long, as it should; test rows are those of "
            "requests that were not cut, so it errs on the long side here"
        ]

    def fit(self, train: RowTable, validation: RowTable) -> None:
        """Estimate the curve from the requests of the training rows.

        Raises:
            ValueError: there are no training rows.
        """
        self._curve = SurvivalCurve.estimate(*request_lengths(train))

    def predict(self, rows: RowTable) -> npt.NDArray[np.float32]:
        """Return the age's median remaining tokens, [n_rows].

        Raises:
            RuntimeError: ``fit`` was not called.
        """
        return fitted(self._curve, self.name).median_remaining(rows.generated_tokens)
