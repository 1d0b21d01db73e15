"""What a client is promised: seconds to the first token, and seconds for each one after it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

TTFT_KEY, TPOT_KEY = "ttft_s", "tpot_s"
_BOUNDS = {TTFT_KEY: (0.001, 3600.0), TPOT_KEY: (0.0001, 60.0)}
"""Seconds within which an objective makes sense."""


class Objectives(NamedTuple):
    """The objectives of a request, in seconds.

    Attributes:
        ttft: to the first token.
        tpot: for each token after it, on average.
    """

    ttft: float
    tpot: float

    def deadline(self, arrival: float, token: int) -> float:
        r"""Return when a token is due, :math:`arrival + TTFT + j \cdot TPOT` (Lyu et al., §3.1).

        A token that comes early makes those after it no more urgent, so that an engine can save
        time up.

        Args:
            arrival: of the request, on any clock.
            token: j, from 0.
        """
        return arrival + self.ttft + token * self.tpot

    def less(self, share: float) -> "Objectives":
        """Return what to plan for, so that a share of the time is left for what comes slower."""
        return Objectives(self.ttft * (1 - share), self.tpot * (1 - share))


def read_objectives(given: Mapping[str, Any] | None, default: Objectives) -> Objectives:
    """Return a request's objectives.

    Args:
        given: ``vllm_xargs`` of the request, which may hold ``ttft_s`` and ``tpot_s``.
        default: for what is not given.

    Raises:
        ValueError: not a number, or out of bounds; the message names it.
    """
    if not given:
        return default
    return Objectives(
        ttft=_seconds(TTFT_KEY, given.get(TTFT_KEY, default.ttft)),
        tpot=_seconds(TPOT_KEY, given.get(TPOT_KEY, default.tpot)),
    )


def _seconds(key: str, value: Any) -> float:
    low, high = _BOUNDS[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise ValueError(f"{key} must be seconds from {low:g} to {high:g}, not {value!r}")
    return float(value)
