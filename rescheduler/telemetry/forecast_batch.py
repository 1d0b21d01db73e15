"""The forecasts of one telemetry message, decoded into arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.live.telemetry_messages import RequestForecast

__all__ = ["SURVIVAL_SCALE", "ForecastBatch"]

SURVIVAL_SCALE = 65_535
"""What a survival probability of 1 is coded as."""


@dataclass(frozen=True, slots=True, eq=False)
class ForecastBatch:
    """Forecasts of some requests of one engine; never changed once made.

    Attributes:
        edges: [n_edges] grid of the curves, in tokens.
        names: [n] ids of the requests as clients know them.
        prompt_tokens: [n] of each request.
        context: [n] tokens of prompt and output when each forecast was made.
        tokens_left: [n] tokens to ``max_tokens`` from there.
        survival: [n, n_edges] the curves, in units of 1 / `SURVIVAL_SCALE`.
    """

    instance: str
    edges: tuple[int, ...]
    names: tuple[str, ...]
    prompt_tokens: npt.NDArray[np.int64]
    context: npt.NDArray[np.int64]
    tokens_left: npt.NDArray[np.int64]
    survival: npt.NDArray[np.uint16]

    @classmethod
    def new(
        cls,
        instance: str,
        edges: Sequence[int],
        names: Sequence[str],
        requests: Sequence[RequestForecast],
    ) -> "ForecastBatch":
        """Return what a checked message forecasts of some of its requests."""
        n = len(requests)
        coded = np.frombuffer(b"".join([one.survival for one in requests]), dtype="<u2")
        return cls(
            instance,
            tuple(edges),
            tuple(names),
            np.fromiter((one.prompt_tokens for one in requests), np.int64, n),
            np.fromiter((one.prompt_tokens + one.forecast_at for one in requests), np.int64, n),
            np.fromiter((one.tokens_left for one in requests), np.int64, n),
            coded.reshape(n, len(edges)),
        )
