"""Methods that a predictor is measured against: three here, and by name those of STAR's Table 1."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import SurvivalForecast
from predictor.forecasts.kaplan_meier import KaplanMeierCurve
from predictor.models.checkpoint import load_predictor
from predictor.models.hidden_state_mlp import RemainingLengthMLP
from predictor.training.row_table import RowTable
from predictor.training.rows_data_module import request_rows

T = TypeVar("T")

COMPARATORS = {
    "constant_median": "predictor.evaluation.comparators:ConstantMedian",
    "kaplan_meier": "predictor.evaluation.comparators:KaplanMeier",
    "regressor": "predictor.evaluation.comparators:Regressor",
    "regressor_cut_as_ended": "predictor.evaluation.comparators:Regressor",
    "prompt_self_report": "rescheduler.papers.comparators:PromptSelfReport",
    "auxiliary_encoder": "rescheduler.papers.comparators:AuxiliaryEncoder",
    "auxiliary_causal_lm": "rescheduler.papers.comparators:AuxiliaryCausalLM",
}
"""``module:class`` of each method, by the name it has in tables and on the command line."""


class Comparator(Protocol):
    """A method that predicts remaining tokens, to be measured beside ours (STAR §4.4, Table 1).

    Attributes:
        name: what the method is called in tables, and in ``COMPARATORS``.
    """

    name: str

    @property
    def parameters(self) -> int:
        """Numbers the method computes a prediction with."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What a reader of its figures must know, such as subsamples."""
        ...

    def fit(self, train: RowTable, validation: RowTable) -> None:
        """Learn from the training rows; the validation rows only choose when to stop.

        Raises:
            ValueError: the rows lack something that the method learns from.
        """
        ...

    def predict(self, rows: RowTable) -> npt.NDArray[np.float32]:
        """Return predicted remaining tokens, [n_rows], none negative.

        Raises:
            RuntimeError: ``fit`` was not called.
            ValueError: the rows lack something that the method reads.
        """
        ...


def create_comparator(name: str, options: dict[str, Any]) -> Comparator:
    """Return the method of that name, loading the module that has it.

    Raises:
        ValueError: an option too many or too few, or a value that the method refuses.
    """
    module, _, kind = COMPARATORS[name].partition(":")
    try:
        comparator: Comparator = getattr(import_module(module), kind)(**options)
    except TypeError as error:
        raise ValueError(f"comparator {name}: {error}") from error
    return comparator


def fitted(learned: T | None, name: str) -> T:
    """Return what ``fit`` learned.

    Raises:
        RuntimeError: nothing was learned yet.
    """
    if learned is None:
        raise RuntimeError(f"{name}: call fit before predict")
    return learned


def request_lengths(rows: RowTable) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the total tokens, and whether cut, of each request with a row, [n_requests_here]."""
    requests = np.unique(rows.request)
    return rows.requests.total_tokens[requests], rows.requests.censored[requests]


class ConstantMedian:
    r"""Predict the training rows' median remaining tokens, whatever the request.

    .. math:: \hat y = \operatorname{median}_i y_i = \arg\min_c \sum_i |y_i - c|

    so no constant has a lower mean absolute error on the training rows. Rows of requests that
    their ``max_tokens`` ended count with the tokens that came; those cut otherwise are left out.
    """

    name = "constant_median"
    parameters = 1
    notes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._median: float | None = None

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
        """Return the median for every row, [n_rows] tokens."""
        return np.full(len(rows), fitted(self._median, self.name), dtype=np.float32)


class KaplanMeier:
    r"""Forecast the remaining tokens given only the tokens generated so far.

    .. math:: S(h \mid n) = \hat S(n + h) / \hat S(n)

    with :math:`\hat S` the Kaplan-Meier curve of total lengths, one observation a training
    request, cut ones as cut. Paper "BalanceRoute" weighs its projections with it. What a
    predictor gains over this is what it reads in the request; what it gains over
    `ConstantMedian` already uses what age alone reveals.
    """

    name = "kaplan_meier"
    notes = (
        f"{name}: counts cut requests as long, as it should, so on the rows of requests "
        "that ended by themselves it errs on the long side",
    )

    def __init__(self) -> None:
        self._curve: KaplanMeierCurve | None = None

    @property
    def parameters(self) -> int:
        """Steps of the curve; 0 before ``fit``."""
        return 0 if self._curve is None else len(self._curve.times)

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
        """Return the age's median remaining tokens, [n_rows]."""
        return np.ceil(self.forecast(rows).median()).astype(np.float32)


class Regressor:
    """Predict with a checkpoint of `RemainingLengthMLP` (STAR §4.2), trained beforehand.

    Args:
        checkpoint: folder or Hugging Face id, trained on the same split of the same dataset.
    """

    name = "regressor"
    notes: tuple[str, ...] = ()

    def __init__(self, checkpoint: str) -> None:
        self._checkpoint = checkpoint
        self._predictor: RemainingLengthMLP | None = None

    @property
    def parameters(self) -> int:
        """Weights of the MLP; 0 before ``fit``."""
        weights = self._predictor.parameters() if self._predictor else ()
        return sum(weight.numel() for weight in weights)

    @property
    def training_seconds(self) -> float:
        """What the training took that wrote the checkpoint."""
        trained = self._predictor.provenance if self._predictor else {}
        return float(trained.get("training_seconds", 0.0))

    def fit(self, train: RowTable, validation: RowTable) -> None:
        """Load the checkpoint, refusing one that saw other training requests.

        Raises:
            CheckpointError: no checkpoint.
            ModelMismatchError: it is of another serving model.
            ValueError: it is no regressor, or was trained on other rows.
        """
        predictor = load_predictor(self._checkpoint)
        if not isinstance(predictor, RemainingLengthMLP):
            raise ValueError(f"{self._checkpoint} holds a {predictor.kind} model, no regressor")
        predictor.refuse_other_model(train.session)
        trained = predictor.provenance.get("rows", {}).get("train")
        if trained not in (len(train), len(train.uncensored()), len(train.ran_to_their_end())):
            raise ValueError(
                f"{self._checkpoint} was trained on {trained} rows, this split has {len(train)}: "
                "it may have seen the test requests. Train it on this dataset and split"
            )
        self._predictor = predictor

    def predict(self, rows: RowTable) -> npt.NDArray[np.float32]:
        """Return predicted remaining tokens, [n_rows]."""
        predictor = fitted(self._predictor, self.name)
        return predictor.forecast(request_rows(rows)).remaining.astype(np.float32)
