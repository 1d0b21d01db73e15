"""Lets the steps of several emulated engines begin and end together, as those of a group's ranks.

With expert parallelism all ranks exchange tokens in every layer, so that a step takes as long as
that of the rank with the most to read.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

MOST_RANKS = 64
_CAUGHT_UP = 20  # steps, as `StepClock` does
_POLL_SECONDS = 2e-4
_STALE_SECONDS = 600.0
_RANK = [
    *(("steps", np.int64), ("round", np.int64), ("seconds", np.float64)),
    *(("ended", np.int64), ("start", np.float64), ("due", np.float64)),
]
_LAYOUT = np.dtype(
    [
        ("opened", np.int64),
        ("closed", np.int64),
        ("start", np.float64),
        ("due", np.float64),
        ("rank", _RANK, (MOST_RANKS,)),
    ]
)
"""The latest round that a rank has begun, and whose end is known.

Of each rank: whether it takes part, in which round last, with how long a step; and the latest of
its rounds whose end is known.
"""


class StepBarrier:
    r"""Ends the steps of all ranks at the same time, those of a round after the longest of them.

    .. math:: t_{r+1} = t_r + \max_{g \text{ steps}} \big(a + b\,n_g + c\,L_g\big)

    A round is complete when each rank that steps has said how long its step is. A rank that begins
    while others are in a step joins the next one, as one with data parallelism does that has run
    dummy batches. A rank without requests takes no part; one that says nothing for a while, since
    its requests have ended or it was killed, takes no part any more.

    The ranks are processes of one machine and share a file.

    Attributes:
        patience: seconds that the others wait for a rank.

    Raises:
        OSError: the file cannot be shared.
    """

    def __init__(self, file: Path, rank: int, patience: float) -> None:
        self._rank, self._patience = rank, patience
        self._steps = False
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self._file = os.fdopen(opened, "r+b", buffering=0)
        with self._locked():
            if os.fstat(opened).st_size != _LAYOUT.itemsize:
                self._file.truncate(0)
                self._file.truncate(_LAYOUT.itemsize)
            whole = np.memmap(self._file, _LAYOUT, "r+", shape=1)
            self._shared = whole[0]
            if abs(time.perf_counter() - self._shared["due"]) > _STALE_SECONDS:
                whole[:] = np.zeros(1, _LAYOUT)  # of engines that were killed, before a restart
        self.leave()

    def step(self, seconds: float, goes_on: bool) -> tuple[float, float]:
        """Take part in a round with a step of so many seconds; return when it began, and ends.

        It goes on with requests of the last one, or is the first of some.
        """
        number = self._joined(seconds, goes_on)
        limit = time.perf_counter() + self._patience
        mine = self._shared["rank"][self._rank]
        while True:
            with self._locked():
                if time.perf_counter() > limit and self._shared["closed"] < number:
                    ranks = self._shared["rank"]
                    ranks["steps"][ranks["round"] < number] = 0  # nobody waits for the others
                    self._close_if_complete()
                if mine["ended"] >= number:
                    return float(mine["start"]), float(mine["due"])
            time.sleep(_POLL_SECONDS)

    def leave(self) -> None:
        """Take no part in what follows."""
        with self._locked():
            self._shared["rank"][self._rank]["steps"] = 0
            self._close_if_complete()
        self._steps = False

    def idle(self) -> None:
        """Take no part in what follows, if it is not so already."""
        if self._steps:
            self.leave()

    def close(self) -> None:
        """Leave, and close the file."""
        self.leave()
        self._file.close()

    def _joined(self, seconds: float, goes_on: bool) -> int:
        """Publish how long a step is, once any round that is already in progress has ended."""
        while True:
            with self._locked():
                wait = self._may_begin(goes_on)
                if wait <= 0:
                    number = int(self._shared["opened"])
                    mine = self._shared["rank"][self._rank]
                    mine["steps"], mine["round"], mine["seconds"] = 1, number, seconds
                    self._steps = True
                    self._close_if_complete()
                    return number
            time.sleep(max(wait, _POLL_SECONDS))

    def _may_begin(self, goes_on: bool) -> float:
        """Return how many seconds of a round in progress are left; open one if none is."""
        shared, now = self._shared, time.perf_counter()
        if shared["opened"] > shared["closed"]:
            return 0.0
        ranks = shared["rank"]
        mine = ranks[self._rank]
        member = bool(mine["steps"]) and mine["round"] == shared["opened"]
        others = int(ranks["steps"].sum()) > int(mine["steps"])
        if others and not member and now < shared["due"]:
            return float(shared["due"] - now)
        follows = others or (member and goes_on)
        shared["opened"] += 1
        shared["start"] = now
        if follows and now - shared["due"] < self._patience:
            shared["start"] = shared["due"]
        return 0.0

    def _close_if_complete(self) -> None:
        shared, ranks = self._shared, self._shared["rank"]
        steps = ranks["steps"] == 1
        opened = shared["opened"]
        if shared["closed"] == opened or not (ranks["round"][steps] == opened).all():
            return
        longest = float(ranks["seconds"][steps].max(initial=0.0))
        earliest = time.perf_counter() - _CAUGHT_UP * longest
        shared["start"] = max(float(shared["start"]), earliest)
        shared["due"] = shared["start"] + longest
        for name in ("start", "due"):
            ranks[name][steps] = shared[name]
        ranks["ended"][steps] = opened
        shared["closed"] = opened  # last: whoever is killed before leaves a round to close again

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
