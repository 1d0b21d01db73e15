"""How much an answer repeats itself: a loop seldom ends before its ``max_tokens``."""

from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled

MEMORY = 256
"""Tokens at the end of an answer in which repetitions are looked for."""

_GRAM = 4
_WINDOW = 64
_SLOTS = 2 * MEMORY


@compiled
def repetition(tokens: npt.NDArray[Any]) -> tuple[float, float]:
    r"""Return the share of the newest 4-grams that occurred before, and the repeated suffix.

    .. math:: \frac{1}{|E|} \sum_{e \in E} \big[\exists\, e' < e:
        (t_{e'-3}, \dots, t_{e'}) = (t_{e-3}, \dots, t_e)\big], \qquad
        \max \{l \le 64: \exists\, e' < n: (t_{e'-l+1}, \dots, t_{e'}) = (t_{n-l+1}, \dots, t_n)\}

    E are the ends of the 4-grams that end in the last 64 tokens; e' runs over the last 256. The
    first tells texts that come back to the same phrases, the second exact loops.

    Args:
        tokens: [n] token ids of an answer; the last 256 are read.
    """
    begin = max(0, len(tokens) - MEMORY)
    first = begin + _GRAM - 1
    newest = max(first, len(tokens) - _WINDOW)
    slots = np.full(_SLOTS, -1, np.int64)
    repeated = 0
    for end in range(first, len(tokens)):
        key = 0
        for i in range(end - _GRAM + 1, end + 1):
            key = (key * 31 + tokens[i]) % 1_000_003
        slot = key % _SLOTS
        while slots[slot] >= 0 and _common(tokens, slots[slot], end, begin, _GRAM) < _GRAM:
            slot = (slot + 1) % _SLOTS
        if slots[slot] < 0:
            slots[slot] = end
        elif end >= newest:
            repeated += 1
    suffix = 0
    for end in range(begin, len(tokens) - 1):
        suffix = max(suffix, _common(tokens, end, len(tokens) - 1, begin, _WINDOW))
    return repeated / max(1, len(tokens) - newest), float(suffix)


@compiled
def _common(tokens: npt.NDArray[Any], one: int, other: int, begin: int, most: int) -> int:
    """Return how many tokens up to one place equal those up to another, later one."""
    length = 0
    while (
        length < most and one - length >= begin and tokens[one - length] == tokens[other - length]
    ):
        length += 1
    return length
