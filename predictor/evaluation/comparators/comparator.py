"""What every comparator of the remaining-length predictor offers, and the tokens of a row."""

from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from data_collection.dataset.dataset_schema import Session
from data_collection.models import identify, resolve_model
from predictor.training.row_table import RowTable

__all__ = ["Comparator", "fitted", "request_lengths", "row_token_ids", "serving_model_folder"]

T = TypeVar("T")


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
    def notes(self) -> list[str]:
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


def fitted(learned: T | None, name: str) -> T:
    """Return what ``fit`` learned.

    Raises:
        RuntimeError: nothing was learned yet.
    """
    if learned is None:
        raise RuntimeError(f"{name}: call fit before predict")
    return learned


def request_lengths(rows: RowTable) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the total tokens, and whether cut, of each request with a row here.

    Returns:
        total_tokens: [n_requests_here], a lower bound where the request was cut.
        censored: [n_requests_here].
    """
    requests = np.unique(rows.request)
    return rows.requests.total_tokens[requests], rows.requests.censored[requests]


def row_token_ids(rows: RowTable, i: int) -> tuple[list[int], list[int]]:
    """Return what the serving model had before it when row i was captured.

    Returns:
        The prompt's token ids, and those of the n tokens generated so far.

    Raises:
        ValueError: the dataset was recorded without token ids.
    """
    request = int(rows.request[i])
    prompt = rows.requests.prompt_token_ids[request]
    output = rows.requests.output_token_ids[request]
    if prompt is None or output is None:
        raise ValueError(
            f"request {rows.requests.request_id[request]} was recorded without token ids, so "
            "its text is unknown: collect with token ids, or leave out comparators that read text"
        )
    return list(prompt), list(output[: int(rows.generated_tokens[i])])


def serving_model_folder(serving_model: str, session: Session) -> str:
    """Return what transformers loads for the model that the rows were recorded from.

    Args:
        serving_model: ``smollm2``, a Hugging Face id or a folder.
        session: how the rows were recorded.

    Raises:
        ValueError: it is another model, whose tokens would spell another text.
    """
    folder = resolve_model(serving_model)
    found = identify(folder).name
    if found != session.model:
        raise ValueError(
            f"serving_model is {found}, the rows were recorded from {session.model}: "
            "give the model that was served"
        )
    return folder
