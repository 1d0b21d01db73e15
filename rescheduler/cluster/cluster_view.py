"""What a rescheduler knows of a cluster at one moment, how that looks, and what it decides."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from predictor.forecasts.curve_plot import AHEAD, LOAD, axes_to_draw
from predictor.forecasts.forecast import Forecast

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

UNLIMITED = np.int64(2**40)
"""KV capacity of an instance with unlimited memory, and free slots of a queue; sums of a
cluster's do not overflow."""

NEVER_MOVED = np.int64(2**40)
"""Decode steps since the last move of a request that has never moved."""

CANNOT_MOVE = np.int64(-1)
"""In their place, that a request cannot move now: it has not started, or is on its way."""


_WIDTH, _TALLEST = 7.2, 12.0
BAR_HEIGHT = 0.62
"""Of the distance between two rows."""
_ALPHAS = (0.9, 0.6)
_NAMED = 32
"""Instances whose names have room beside their bars."""
_TO_10_PERCENT = 1.2816
"""Standard deviations between the mean and the 10 or 90% quantile of a normal distribution."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Decode instances, the requests on them, and the requests that wait for a place.

    Built alike by the simulator and by the live rescheduler. Of requests placed on an instance
    that it has not started yet, nothing but their number and tokens matters to a policy: they
    are among the running ones here, counted in ``queued``.

    Attributes:
        slots: [n_instances] places of each instance (``max_num_seqs``).
        kv_capacity: [n_instances] tokens that its KV cache holds; ``UNLIMITED`` if unknown.
        queued: [n_instances] requests placed there that have not started.
        instance: [n_running] where each request is, from 0.
        prompt_tokens: [n_running].
        generated_tokens: [n_running].
        forecast: of the running requests' remaining length, or None without a forecast.
        waiting_prompt_tokens: [n_waiting] of the waiting pool, in order of arrival.
        waiting_generated_tokens: [n_waiting] tokens that prefill has already given.
        waiting_forecast: of the waiting requests' remaining length, or None.
        waited_steps: [n_waiting] decode steps that each has waited.
        dispatched: requests routed before, for policies that take turns.
        instant: each request is placed as it arrives and queues at its instance, so that
            neither slots nor KV capacity limit where it may go.
        since_move: [n_running] decode steps since each request last moved to another instance,
            `NEVER_MOVED` if it has not, `CANNOT_MOVE` if it is not to move now; None if all may
            and none has.
        prefill_budget: [n_instances] prompt tokens that each engine can take on and still
            compute within their time, as it last reported, less those placed there since; None
            if engines report none.
        step_seconds: mean duration of a decode step lately; None where nobody measures it.
    """

    slots: IntArray
    kv_capacity: IntArray
    queued: IntArray
    instance: IntArray
    prompt_tokens: IntArray
    generated_tokens: IntArray
    forecast: Forecast | None
    waiting_prompt_tokens: IntArray
    waiting_generated_tokens: IntArray
    waiting_forecast: Forecast | None
    waited_steps: IntArray
    dispatched: int = 0
    instant: bool = False
    since_move: IntArray | None = None
    prefill_budget: FloatArray | None = None
    step_seconds: float | None = None

    def __post_init__(self) -> None:
        """Refuse arrays that do not belong together.

        Raises:
            ValueError: an array of another length, or an instance outside the cluster.
        """
        n_instances, n_running = len(self.slots), len(self.instance)
        n_waiting = len(self.waiting_prompt_tokens)
        for name, length in (
            ("kv_capacity", n_instances),
            ("queued", n_instances),
            ("prompt_tokens", n_running),
            ("generated_tokens", n_running),
            ("forecast", n_running),
            ("waiting_generated_tokens", n_waiting),
            ("waiting_forecast", n_waiting),
            ("waited_steps", n_waiting),
            ("since_move", n_running),
            ("prefill_budget", n_instances),
        ):
            values = getattr(self, name)
            if values is not None and len(values) != length:
                raise ValueError(f"{name} is of {len(values)}, not of {length}")
        if n_running and not 0 <= self.instance.min() <= self.instance.max() < n_instances:
            raise ValueError(f"a request is on an instance that is not one of {n_instances}")

    def __repr__(self) -> str:
        loads = ", ".join(f"{load:,}" for load in self.kv_load[:8])
        more = ", ..." if self.n_instances > 8 else ""
        return (
            f"<ClusterView: {self.n_instances} instances with {loads}{more} context tokens, "
            f"{len(self.instance)} requests running, {self.n_waiting} waiting>"
        )

    @property
    def n_instances(self) -> int:
        """Number of decode instances."""
        return len(self.slots)

    @property
    def n_waiting(self) -> int:
        """Number of requests in the waiting pool."""
        return len(self.waiting_prompt_tokens)

    @property
    def context_tokens(self) -> IntArray:
        """Tokens each running request holds in its KV cache, [n_running]."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def running(self) -> IntArray:
        """Requests on each instance, [n_instances], those it has not started included."""
        return np.bincount(self.instance, minlength=self.n_instances).astype(np.int64)

    @property
    def kv_load(self) -> IntArray:
        """Context tokens on each instance, [n_instances]."""
        loads = np.bincount(self.instance, weights=self.context_tokens, minlength=self.n_instances)
        return loads.astype(np.int64)

    def plot(self, ax: "Axes | None" = None, steps: int = 128) -> "Axes":
        """Draw each instance's KV load as a bar of its requests, its capacity, and what is ahead.

        With forecasts, a mark shows the load expected ``steps`` decode steps from now if no
        request is added, and a line its 80% interval: 1.28 standard deviations to either side.

        Args:
            ax: matplotlib axes to draw on; a new figure if there are none.
            steps: how far ahead the mark is.
        """
        with self.drawn(ax, steps) as axes:
            return axes

    @contextmanager
    def drawn(self, ax: "Axes | None" = None, steps: int = 128) -> Iterator["Axes"]:
        """Draw what `plot` does; give the axes, to add to while the context lasts."""
        rows, height = range(self.n_instances), min(1.4 + 0.5 * self.n_instances, _TALLEST)
        with axes_to_draw(ax, _WIDTH, height) as axes:
            self._draw_bars(axes)
            if self.forecast is not None:
                self._draw_ahead(axes, self.forecast, steps)
            if self.n_instances <= _NAMED:
                axes.set_yticks(rows, [f"instance {g}" for g in rows])
            axes.set_ylim(self.n_instances - 0.25, -0.75)
            axes.set_xlim(left=0)
            axes.grid(axis="y", visible=False)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.set_xlabel("context tokens")
            axes.legend(
                loc="lower left",
                bbox_to_anchor=(0, 1),
                ncols=3,
                borderaxespad=0.2,
                columnspacing=1.2,
                fontsize="small",
                frameon=False,
            )
            yield axes

    def bars(self) -> tuple[IntArray, IntArray]:
        """Return where each request's part of its instance's bar begins, and which part it is.

        Both are [n_running]: in tokens, and counted from 0.
        """
        order = np.argsort(self.instance, kind="stable")
        where, context = self.instance[order], self.context_tokens[order]
        first = np.searchsorted(where, where)
        before = np.cumsum(context) - context
        start, part = np.empty((2, len(order)), dtype=np.int64)
        start[order] = before - before[first]
        part[order] = np.arange(len(order)) - first
        return start, part

    def _draw_bars(self, axes: "Axes") -> None:
        from matplotlib import rcParams

        rows, (start, part) = np.arange(self.n_instances), self.bars()
        for shade, alpha in enumerate(_ALPHAS):  # neighbours differ
            some = part % len(_ALPHAS) == shade
            axes.barh(
                self.instance[some],
                self.context_tokens[some],
                left=start[some],
                height=BAR_HEIGHT,
                color=LOAD,
                alpha=alpha,
                linewidth=0,
                label="now, by request" if shade == 0 else None,
            )
        axes.vlines(
            np.where(self.kv_capacity < UNLIMITED // 2, self.kv_capacity, np.nan),
            rows - 0.4,
            rows + 0.4,
            color=rcParams["axes.edgecolor"],
            linewidth=2.5,
            label="capacity",
        )

    def _draw_ahead(self, axes: "Axes", forecast: Forecast, steps: int) -> None:
        from predictor.forecasts.expected_load import expected_load

        load = expected_load(forecast, self.instance, self.context_tokens, self.n_instances, steps)
        axes.errorbar(
            load.mean[:, -1],
            np.arange(self.n_instances),
            xerr=_TO_10_PERCENT * np.sqrt(load.variance[:, -1]),
            fmt="D",
            color=AHEAD,
            markeredgecolor="white",
            zorder=5,
            label=f"in {steps:,} steps, 80% interval",
        )


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where waiting requests go.

    Attributes:
        instance: [n_waiting] instance from 0, or -1 for a request that keeps waiting.
    """

    instance: IntArray
