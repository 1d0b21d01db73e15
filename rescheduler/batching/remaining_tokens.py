"""What the requests of a scheduler are expected to generate yet."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from predictor.live.engine_forecasts import EngineForecasts

__all__ = ["remaining_tokens"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def remaining_tokens(
    forecasts: Mapping[str, tuple[EngineForecasts, int]],
    names: Sequence[str],
    generated: IntArray,
) -> FloatArray:
    """Return E[R] of each request, [n] tokens, infinite without a forecast.

    Forecasts that were made in one step are aged and integrated together.

    Args:
        forecasts: request id -> the step's forecasts that it is in, and its row there.
        names: [n] ids of the requests.
        generated: [n] tokens they have generated.
    """
    remaining = np.full(len(names), np.inf)
    steps: dict[int, list[int]] = {}
    for i, name in enumerate(names):
        if name in forecasts:
            steps.setdefault(id(forecasts[name][0]), []).append(i)
    for members in steps.values():
        made = forecasts[names[members[0]]][0]
        rows = np.array([forecasts[names[i]][1] for i in members])
        since = generated[members] - np.asarray(made.generated_tokens)[rows]
        forecast = made.forecast().select(rows).aged(np.maximum(since, 0))
        remaining[members] = forecast.mean()
    return remaining
