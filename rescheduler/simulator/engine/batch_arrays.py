"""Scratch arrays for the requests of one instance, as batches and budgets are computed of them."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["BatchArrays", "new_batch_arrays"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class BatchArrays(NamedTuple):
    """The requests that an instance may compute now, decodes first, then prefills.

    As `form_batch` and `prefill_budget` read them; each is [rows], of which as many are in use
    as the instance has requests.

    Attributes:
        row: of each request.
        slack: seconds until its next token is due.
        tpot: its objective, seconds.
        decoding: it decodes; else it prefills.
        wanted: tokens that could be computed now.
        context: tokens of context once they are.
        order: scratch.
        tokens: to compute.
        prompt_left: tokens of its prompt yet to compute, 0 for decodes.
    """

    row: IntArray
    slack: FloatArray
    tpot: FloatArray
    decoding: npt.NDArray[np.bool_]
    wanted: IntArray
    context: IntArray
    order: IntArray
    tokens: IntArray
    prompt_left: IntArray


def new_batch_arrays(rows: int) -> BatchArrays:
    """Return arrays for as many requests as a cluster has rows."""
    return BatchArrays(
        row=np.zeros(rows, dtype=np.int64),
        slack=np.zeros(rows),
        tpot=np.zeros(rows),
        decoding=np.zeros(rows, dtype=np.bool_),
        wanted=np.zeros(rows, dtype=np.int64),
        context=np.zeros(rows, dtype=np.int64),
        order=np.zeros(rows, dtype=np.int64),
        tokens=np.zeros(rows, dtype=np.int64),
        prompt_left=np.zeros(rows, dtype=np.int64),
    )
