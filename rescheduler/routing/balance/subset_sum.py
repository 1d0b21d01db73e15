"""Subset sums by bitset: which sums some of the sizes have, and which sizes make one of them."""

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled

__all__ = ["fullest_sum", "reachable_sums", "subset_of_sum"]

IntArray = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint64]


@compiled
def reachable_sums(sizes: IntArray, most_items: int, largest: int) -> Bits:
    """Return which sums some of the first i sizes have, [n + 1, most_items + 1, words].

    Bit s of row (i, j) is set where exactly j of the first i sizes sum to s, s ≤ ``largest``
    (and to the end of that word). A row is its predecessor or'ed with the row of one item less,
    shifted by the size: 64 sums at a time.
    """
    n_words = largest // 64 + 1
    reach = np.zeros((len(sizes) + 1, most_items + 1, n_words), dtype=np.uint64)
    reach[0, 0, 0] = 1
    for i in range(len(sizes)):
        words, bits = sizes[i] // 64, np.uint64(sizes[i] % 64)
        reach[i + 1] = reach[i]
        for j in range(min(i, most_items - 1) + 1):
            for w in range(words, n_words):
                shifted = reach[i, j, w - words] << bits
                if bits > 0 and w > words:
                    shifted |= reach[i, j, w - words - 1] >> (np.uint64(64) - bits)
                reach[i + 1, j + 1, w] |= shifted
    return reach


@compiled
def subset_of_sum(reach: Bits, sizes: IntArray, n_items: int, total: int) -> npt.NDArray[np.bool_]:
    """Return which ``n_items`` of the sizes make a sum that `reachable_sums` found; early ones."""
    taken = np.zeros(len(sizes), dtype=np.bool_)
    for i in range(len(sizes) - 1, -1, -1):
        if not _has(reach[i, n_items], total):
            taken[i] = True
            n_items -= 1
            total -= sizes[i]
    return taken


@compiled
def _has(sums: Bits, total: int) -> bool:
    return (sums[total // 64] >> np.uint64(total % 64)) & np.uint64(1) > 0  # type: ignore[no-any-return]


@compiled
def fullest_sum(sums: Bits, safe: int, largest: int) -> int:
    """Return the largest sum within ``safe``, else the smallest above it, else -1; 0 is none."""
    for total in range(min(safe, largest), 0, -1):
        if _has(sums, total):
            return total
    for total in range(max(safe, 0) + 1, largest + 1):
        if _has(sums, total):
            return total
    return -1
