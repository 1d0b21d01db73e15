"""What an engine's log of steps says: see `benchmarks.support.cpu_rank_worker`."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class Steps(NamedTuple):
    """Steps of an engine, in order.

    Attributes:
        begins: seconds on the monotonic clock, [n].
        requests: in each; 0 where only another rank had some, [n].
        new: tokens computed, [n].
        context: context tokens of its requests, [n].
    """

    begins: FloatArray
    requests: FloatArray
    new: FloatArray
    context: FloatArray

    def between(self, start: float, end: float) -> "Steps":
        inside = (self.begins >= start) & (self.begins <= end)
        return Steps(*(column[inside] for column in self))

    def seconds(self, requests: int) -> FloatArray:
        """Return the seconds of all but the last step that decode so many requests and no more."""
        alike = (self.requests[:-1] == requests) & (self.new[:-1] == requests)
        return np.asarray(np.diff(self.begins)[alike])


def read_steps(log: Path) -> Steps:
    """Return the whole lines of a log; no steps if there is none yet."""
    text = log.read_text() if log.is_file() else ""
    lines = text[: text.rfind("\n") + 1].split()
    rows = np.array([line.split(",") for line in lines], dtype=np.float64).reshape(-1, 4)
    return Steps(*rows.T)


def contexts_at(steps: Steps, times: FloatArray) -> FloatArray:
    """Return the context tokens of the step under way at each time; 0 before the first, [n]."""
    context = np.concatenate([[0.0], steps.context])
    return context[np.searchsorted(steps.begins, times, "right")]
