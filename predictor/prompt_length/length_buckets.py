"""Ranges of an answer's length, as a classifier predicts them before the answer begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import Forecast

__all__ = ["BucketOptions", "LengthBuckets"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """Ranges of the tokens L that a request generates: bucket k is edges[k] ≤ L < edges[k + 1].

    The last bucket is open. Jain et al. 2025 (§4.1) draw them by completion time, since what a
    router must know is for how long a request will hold its place.

    Attributes:
        edges: where each bucket begins, ascending whole tokens from 0.

    Raises:
        ValueError: the edges are no such list.
    """

    edges: tuple[int, ...]

    def __post_init__(self) -> None:
        edges = self.edges
        if len(edges) < 2 or edges[0] != 0 or edges[1] < 2:
            raise ValueError(
                f"length buckets begin at 0, then at 2 tokens or more, not at {list(edges)}"
            )
        if any(after <= before for before, after in pairwise(edges)):
            raise ValueError(f"length buckets must ascend, {list(edges)} do not")

    @classmethod
    def equal(cls, width: int, until: int) -> "LengthBuckets":
        """Return buckets of one width, and an open one from the first edge at ``until`` on."""
        if width < 2 or until < width:
            raise ValueError(f"no buckets of {width} tokens until {until}")
        return cls(tuple(range(0, until + width, width)))

    @classmethod
    def by_completion_time(
        cls, seconds: Sequence[float], tokens_per_second: float
    ) -> "LengthBuckets":
        """Return the buckets of answers that end within so many seconds (Jain et al. §4.1).

        The paper: within 0.5 and 2 s at 500 tokens a second, 250 and 1000 tokens. (Its third
        bucket ends at 4 s, which would be 2000 tokens, and is printed as 4000.)

        Args:
            seconds: ascending, without 0; the last bucket is open.
            tokens_per_second: that one request gets, 1/(a + b + c·context) of a profile.
        """
        if not 0 < tokens_per_second < np.inf:
            raise ValueError(f"tokens per second must be positive, not {tokens_per_second}")
        return cls((0, *(round(end * tokens_per_second) for end in seconds)))

    def __len__(self) -> int:
        """Return the number of buckets, the open one included."""
        return len(self.edges)

    @property
    def names(self) -> tuple[str, ...]:
        """What tables call the buckets, such as ``250–999``."""
        closed = [f"{low}–{high - 1}" for low, high in pairwise(self.edges)]
        return (*closed, f"≥{self.edges[-1]}")

    def of(self, lengths: npt.NDArray[np.integer]) -> IntArray:
        """Return the bucket that each length is in, [n]."""
        found: IntArray = np.searchsorted(self.edges, lengths, side="right") - 1
        return found.astype(np.int64)

    def masses(self, forecast: Forecast) -> FloatArray:
        """Return P(L in bucket) under forecasts made before the first token, [n, n_buckets]."""
        reached = forecast.at(np.array(self.edges[1:], dtype=np.float64) - 1)
        ends = np.zeros((len(forecast), 1))
        return -np.diff(np.concatenate([ends + 1, reached, ends], axis=1), axis=1)


@dataclass(frozen=True)
class BucketOptions:
    """Buckets as a configuration gives them, in one of three ways.

    Attributes:
        edges: where each bucket after the first begins, in tokens.
        width: or: tokens in each bucket,
        until: up to so many.
        seconds: or: completion times,
        tokens_per_second: at so many tokens a second.
    """

    edges: tuple[int, ...] | None = None
    width: int | None = None
    until: int | None = None
    seconds: tuple[float, ...] | None = None
    tokens_per_second: float | None = None

    def buckets(self) -> LengthBuckets:
        """Return the buckets.

        Raises:
            ValueError: not exactly one way is given, or it gives no buckets.
        """
        given = {name for name, value in vars(self).items() if value is not None}
        if self.edges is not None and given == {"edges"}:
            return LengthBuckets((0, *self.edges))
        if self.width is not None and self.until is not None and given == {"width", "until"}:
            return LengthBuckets.equal(self.width, self.until)
        by_time = given == {"seconds", "tokens_per_second"}
        if self.seconds is not None and self.tokens_per_second is not None and by_time:
            return LengthBuckets.by_completion_time(self.seconds, self.tokens_per_second)
        raise ValueError(
            "buckets are given by edges, by width and until, or by seconds and tokens_per_second"
        )
