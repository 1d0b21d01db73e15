"""STAR's regressor, trained beforehand, as a comparator of the survival model."""

import numpy as np
import numpy.typing as npt

from predictor.evaluation.comparators.comparator import fitted
from predictor.models.checkpoint import load_predictor
from predictor.models.remaining_length_mlp import RemainingLengthMLP
from predictor.training.row_table import RowTable
from predictor.training.rows_data_module import request_rows

__all__ = ["Regressor"]


class Regressor:
    """Predict with a checkpoint of `RemainingLengthMLP` (STAR §4.2).

    Args:
        checkpoint: folder or Hugging Face id, trained on the same split of the same dataset.
    """

    name = "regressor"

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

    @property
    def notes(self) -> list[str]:
        """What a reader of its figures must know."""
        return []

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
        """Return predicted remaining tokens, [n_rows].

        Raises:
            RuntimeError: ``fit`` was not called.
        """
        predictor = fitted(self._predictor, self.name)
        forecast = predictor.forecast(request_rows(rows))
        return forecast.remaining.astype(np.float32)
