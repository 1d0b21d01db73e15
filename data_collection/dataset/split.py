"""Train, validation and test: by the client's request, never by row."""

from typing import Literal

import numpy as np
import numpy.typing as npt

from data_collection.dataset.dataset_schema import DatasetError

__all__ = ["SplitName", "split_requests"]

SplitName = Literal["train", "validation", "test"]

IntArray = npt.NDArray[np.int64]


def split_requests(
    group: IntArray, seed: int, fractions: tuple[float, float, float] = (0.70, 0.15, 0.15)
) -> dict[SplitName, IntArray]:
    """Split requests at random so that no client's request is in two parts (STAR §4.4).

    Args:
        group: [n_requests] requests with the same number stay together.
        seed: the same seed gives the same split.
        fractions: of train, validation and test; they sum to 1.

    Returns:
        For each part the indices of its requests, ascending.

    Raises:
        DatasetError: there are too few requests to fill every part.
        ValueError: the fractions are not positive or do not sum to 1.
    """
    if min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-9:
        raise ValueError(f"split fractions must be positive and sum to 1, not {fractions}")
    groups = np.unique(group)
    order = np.random.default_rng(seed).permutation(groups)
    first = round(fractions[0] * len(groups))
    second = first + max(1, round(fractions[1] * len(groups)))
    parts: dict[SplitName, IntArray] = {
        "train": order[:first],
        "validation": order[first:second],
        "test": order[second:],
    }
    if min(len(part) for part in parts.values()) == 0:
        raise DatasetError(
            f"{len(groups)} requests are too few to split into train, validation and test"
        )
    return {name: np.flatnonzero(np.isin(group, part)) for name, part in parts.items()}
