"""The grid of token counts on which survival curves are learned and sent."""

import numpy as np
import numpy.typing as npt

__all__ = ["survival_edges"]

IntArray = npt.NDArray[np.int64]


def survival_edges(limit: int, first: int = 5, dense_until: int = 20, octave: int = 6) -> IntArray:
    """Return edges dense near 0 and logarithmic to the model's limit.

    Routing looks tens of tokens ahead, where a bin must be small; far away a relative error is
    what matters, so that bins may grow with the distance.

    Args:
        limit: the last edge: tokens that no request can pass, such as the model's context.
        first: width in tokens of the bins near 0.
        dense_until: where bins begin to grow.
        octave: bins in each doubling from there.

    Returns:
        [n_edges] ascending whole tokens, from 0 to ``limit``.

    Raises:
        ValueError: a number is below 1, or ``limit`` is not above ``dense_until``.
    """
    if min(limit, first, dense_until, octave) < 1 or limit <= dense_until:
        raise ValueError(
            f"no grid to {limit} tokens in bins of {first} up to {dense_until}, then {octave} "
            "a doubling"
        )
    dense = np.arange(0, dense_until, first)
    bins = max(1, round(octave * np.log2(limit / dense_until)))
    grown = np.geomspace(dense_until, limit, bins + 1).round()
    edges: IntArray = np.unique(np.concatenate([dense, grown])).astype(np.int64)
    return edges
