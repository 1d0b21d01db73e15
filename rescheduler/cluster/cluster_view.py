"""What a rescheduler knows of a cluster at one moment, how that looks, and what it decides."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from predictor.forecasts.curve_plot import AHEAD, LOAD

if TYPE_CHECKING:
    from matplotlib.axes import Axes

from typing import TYPE_CHECKING

from predictor.forecasts.curve_plot import axes_to_draw
from predictor.forecasts.forecast import Forecast

if TYPE_CHECKING:
    from matplotlib.axes import Axes


IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_WIDTH, _TALLEST = 7.2, 12.0
BAR_HEIGHT = 0.62
"""Of the distance between two rows."""
_ALPHAS = (0.9, 0.6)
_NAMED = 32
"""Instances whose names have room beside their bars."""
_TO_10_PERCENT = 1.2816
"""Standard deviations between the mean and the 10 or 90% quantile of a normal distribution."""


@dataclass(frozen=True, slots=True)
class LoadAhead:
    """What the instances are expected to carry.

    Attributes:
        steps: decode steps from now.
        mean: [n_instances] context tokens.
        deviation: [n_instances] standard deviation of them.
    """

    steps: int
    mean: FloatArray
    deviation: FloatArray


@dataclass(frozen=True, slots=True)
class LoadBars:
    """What a figure of a cluster shows.

    Attributes:
        instance: [n_running] where each request is, from 0.
        context: [n_running] tokens in its KV cache.
        capacity: [n_instances] tokens that each instance holds; nan if unlimited.
        ahead: the loads ahead, or None without forecasts.
    """

    instance: IntArray
    context: IntArray
    capacity: FloatArray
    ahead: LoadAhead | None

    @property
    def figure_size(self) -> tuple[float, float]:
        """Width and height of a new figure, in inches."""
        return _WIDTH, min(1.4 + 0.5 * len(self.capacity), _TALLEST)

    def starts(self) -> IntArray:
        """Return where each request's part of its instance's bar begins, in tokens, [n_running]."""
        order, first = self._in_rows()
        before = np.cumsum(self.context[order]) - self.context[order]
        found = np.empty(len(order), dtype=np.int64)
        found[order] = before - before[first]
        return found

    def draw(self, axes: "Axes") -> None:
        """Draw the bars, the capacities and the loads ahead."""
        from matplotlib import rcParams

        n_instances = len(self.capacity)
        rows, starts, shades = np.arange(n_instances), self.starts(), self._shades()
        for alpha in _ALPHAS:
            some = shades == alpha
            axes.barh(
                self.instance[some],
                self.context[some],
                left=starts[some],
                height=BAR_HEIGHT,
                color=LOAD,
                alpha=alpha,
                linewidth=0,
                label="now, by request" if alpha == _ALPHAS[0] else None,
            )
        axes.vlines(
            self.capacity,
            rows - 0.4,
            rows + 0.4,
            color=rcParams["axes.edgecolor"],
            linewidth=2.5,
            label="capacity",
        )
        if self.ahead is not None:
            axes.errorbar(
                self.ahead.mean,
                rows,
                xerr=_TO_10_PERCENT * self.ahead.deviation,
                fmt="D",
                color=AHEAD,
                markeredgecolor="white",
                zorder=5,
                label=f"in {self.ahead.steps:,} steps, 80% interval",
            )
        if n_instances <= _NAMED:
            axes.set_yticks(rows, [f"instance {g}" for g in rows])
        axes.set_ylim(n_instances - 0.25, -0.75)
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

    def _in_rows(self) -> tuple[IntArray, IntArray]:
        """Return the requests bar by bar, and the place of the first of each one's bar in that."""
        order = np.argsort(self.instance, kind="stable")
        where = self.instance[order]
        return order, np.searchsorted(where, where)

    def _shades(self) -> FloatArray:
        """Return each request's opacity, [n_running]: neighbours differ."""
        order, first = self._in_rows()
        found = np.empty(len(order))
        found[order] = np.take(_ALPHAS, (np.arange(len(order)) - first) % len(_ALPHAS))
        return found


UNLIMITED = np.int64(2**40)
"""KV capacity of an instance with unlimited memory, and free slots of a queue; sums of a
cluster's do not overflow."""

NEVER_MOVED = np.int64(2**40)
"""Decode steps since the last move of a request that has never moved."""

CANNOT_MOVE = np.int64(-1)
"""In their place, that a request cannot move now: it has not started, or is on its way."""


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
        bars = self.load_bars(steps)
        with axes_to_draw(ax, *bars.figure_size) as axes:
            bars.draw(axes)
        return axes

    def load_bars(self, steps: int = 128) -> LoadBars:
        """Return what `plot` draws, for figures that add to it."""
        limited = self.kv_capacity < UNLIMITED // 2
        return LoadBars(
            instance=self.instance,
            context=self.context_tokens,
            capacity=np.where(limited, self.kv_capacity, np.nan),
            ahead=None if self.forecast is None else self._load_ahead(self.forecast, steps),
        )

    def _load_ahead(self, forecast: Forecast, steps: int) -> LoadAhead:
        from predictor.forecasts.expected_load import expected_load

        load = expected_load(forecast, self.instance, self.context_tokens, self.n_instances, steps)
        return LoadAhead(steps, load.mean[:, -1], np.sqrt(load.variance[:, -1]))


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where waiting requests go.

    Attributes:
        instance: [n_waiting] instance from 0, or -1 for a request that keeps waiting.
    """

    instance: IntArray
