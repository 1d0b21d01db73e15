"""What every migration planner is: named, configured, pure, and plain about its reasons."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from textwrap import fill
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from predictor.forecasts.curve import aged_mean, aged_survival, load_of_known_ends, tokens_left
from predictor.forecasts.curve_plot import MOVING
from predictor.forecasts.expected_load import expected_load
from predictor.forecasts.forecast import Forecast, PointForecast, SurvivalForecast
from rescheduler.cluster.cluster_view import BAR_HEIGHT, NEVER_MOVED, ClusterView
from rescheduler.cluster.registry import COUNT, NOT_NEGATIVE, POSITIVE, Checked, Registry
from rescheduler.routing.inputs import FloatArray, IntArray
from rescheduler.routing.policy import Needs
from rescheduler.step_time.profile import Profile, load_profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class RequestForecasts(NamedTuple):
    """What is forecast of some requests, [k].

    Attributes:
        survival: [k, P] S(h) at the points ahead.
        remaining: [k] E[R], the tokens each is expected to generate yet.
        outlives: [k] S at a number of steps of each request's own.
    """

    survival: FloatArray
    remaining: FloatArray
    outlives: FloatArray


@dataclass(frozen=True, slots=True)
class MigrationInputs:
    r"""One decision, as arrays. G instances, P points ahead, n requests.

    The loads ahead are added up once, as STAR's workers do it, so that a move is judged by the
    two rows that it changes (Wang et al. 2026, §5.2). Most requests are never looked at: what is
    forecast of one is computed only when it is asked for.

    Attributes:
        load: [G] context tokens on each instance now, those on their way to it included.
        room: [G] KV capacity less what is held beside that (contexts on their way out).
        free: [G] slots without a request.
        points: [P] decode steps h ahead, ascending from 0.
        ahead: [G, P] :math:`\Lambda_g(h) = \sum_i S_i(h)(c_i + h)`; the load now at h = 0.
        spread: [G, P] its variance :math:`V_g(h) = \sum_i S_i(h)(1 - S_i(h))(c_i + h)^2`.
        source: [n] instance of each running request.
        context: [n] tokens in its KV cache.
        since_move: [n] as in `ClusterView`.
        forecasts_of: returns what is forecast of the requests with the given indices, [k], and
            whether they outlive so many steps, [k].
    """

    load: IntArray
    room: IntArray
    free: IntArray
    points: IntArray
    ahead: FloatArray
    spread: FloatArray
    source: IntArray
    context: IntArray
    since_move: IntArray
    forecasts_of: Callable[[IntArray, FloatArray], RequestForecasts]


def migration_inputs(view: ClusterView, points: IntArray) -> MigrationInputs:
    """Return the arrays of a decision on a cluster as it is.

    Args:
        view: of the cluster; with forecasts if a point is past 0.
        points: [P] decode steps ahead, ascending from 0.

    Raises:
        ValueError: points ahead without forecasts.
    """
    context, n = view.context_tokens, len(view.instance)
    load, forecast = view.kv_load, view.forecast
    ahead, spread = np.zeros((2, view.n_instances, len(points)))
    if len(points) > 1:
        if forecast is None:
            raise ValueError("the planner looks ahead, but there are no forecasts")
        if isinstance(forecast, PointForecast):
            load_of_known_ends(
                forecast.mean(),
                view.instance,
                context,
                points,
                growth=points.astype(np.float64),
                ending=np.empty((2, view.n_instances, len(points) + 1)),
                ahead=ahead,
                alive=np.empty((view.n_instances, 0)),
            )
        else:
            expected = expected_load(
                forecast, view.instance, context, view.n_instances, int(points[-1])
            )
            ahead[:], spread[:] = expected.mean[:, points], expected.variance[:, points]
    ahead[:, 0], spread[:, 0] = load, 0.0

    def forecasts_of(rows: IntArray, steps: FloatArray) -> RequestForecasts:
        return _request_forecasts(forecast, rows, steps, points)

    return MigrationInputs(
        load=load,
        room=view.kv_capacity.astype(np.int64),
        free=view.slots - view.running,
        points=points,
        ahead=ahead,
        spread=spread,
        source=view.instance.astype(np.int64),
        context=context,
        since_move=np.full(n, NEVER_MOVED) if view.since_move is None else view.since_move,
        forecasts_of=forecasts_of,
    )


def _request_forecasts(
    forecast: Forecast | None, rows: IntArray, steps: FloatArray, points: IntArray
) -> RequestForecasts:
    n = len(rows)
    if forecast is None:
        return RequestForecasts(np.ones((n, len(points))), np.zeros(n), np.ones(n))
    if isinstance(forecast, PointForecast):
        remaining: FloatArray = forecast.select(rows).mean()
        survival = (points < remaining[:, None]).astype(np.float64)
        return RequestForecasts(survival, remaining, (steps < remaining).astype(np.float64))
    if isinstance(forecast, SurvivalForecast):
        found = RequestForecasts(np.empty((n, len(points))), np.empty(n), np.empty(n))
        _write_forecasts(*forecast.arrays(), rows, points, steps, *found)
        return found
    some = forecast.select(rows)
    return RequestForecasts(some.at(points), some.mean(), some.at_each(steps))


@compiled
def _write_forecasts(
    edges: FloatArray,
    survival: npt.NDArray[np.floating[Any]],
    age: FloatArray,
    limit: FloatArray,
    rows: IntArray,
    points: IntArray,
    steps: FloatArray,
    at_points: FloatArray,
    remaining: FloatArray,
    outlives: FloatArray,
) -> None:
    """Write the `RequestForecasts` of the requests in the given rows."""
    for k in range(len(rows)):
        i = rows[k]
        one = slice(k, k + 1)
        aged_survival(edges, survival[i], age[i], limit[i], points, at_points[k])
        aged_survival(edges, survival[i], age[i], limit[i], steps[one], outlives[one])
        mean = aged_mean(edges, survival[i], age[i], limit[i])
        remaining[k] = min(mean, tokens_left(edges, age[i], limit[i]))


_CHARACTERS = 90


def _draw_move(
    axes: "Axes", source: tuple[float, int], target: tuple[float, int], tokens: int, label: str
) -> None:
    """Draw a request where it is, outlined where it goes, with an arrow and a label."""
    for (start, row), filled in ((source, True), (target, False)):
        axes.barh(
            row,
            tokens,
            left=start,
            height=BAR_HEIGHT,
            facecolor=MOVING if filled else "none",
            edgecolor=MOVING,
            linestyle="solid" if filled else "dashed",
            linewidth=1.5,
            zorder=3,
        )
    ends = [(start + tokens / 2, row) for start, row in (source, target)]
    axes.annotate(
        "",
        xy=ends[1],
        xytext=ends[0],
        arrowprops={
            "arrowstyle": "-|>",
            "connectionstyle": "arc3,rad=0.2",
            "color": MOVING,
            "linewidth": 2,
            "mutation_scale": 18,
        },
        zorder=4,
    )
    side = 1 if source[1] < target[1] else -1  # away from where the arrow comes
    axes.text(
        ends[1][0],
        target[1] + side * BAR_HEIGHT / 1.75,
        label,
        ha="center",
        va="top" if side > 0 else "bottom",  # rows are numbered downwards
        fontsize="small",
        zorder=4,
    )


@dataclass(frozen=True, slots=True)
class Migration:
    """One request that is to move.

    Attributes:
        request: its index among the running requests of the view.
        source: instance that it is on.
        target: instance that it goes to.
        gain: part of the objective's variance, as it is before the plan, that the move is
            predicted to take away, in (0, 1].
    """

    request: int
    source: int
    target: int
    gain: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to move now.

    Attributes:
        migrations: none, one, or several; each is right if those before it are carried out.
        reason: in words, why these were the best, or why none is worth it.
    """

    migrations: list[Migration]
    reason: str

    def plot(self, view: ClusterView, ax: "Axes | None" = None) -> "Axes":
        """Draw the cluster, an arrow for each move, and the reason."""
        starts, _ = view.bars()
        remaining = None if view.forecast is None else view.forecast.mean()
        arrives = view.kv_load.copy()
        with view.drawn(ax) as axes:
            for move in self.migrations:
                tokens = int(view.context_tokens[move.request])
                label = f"request {move.request}"
                if remaining is not None:
                    label += f", about {remaining[move.request]:,.0f} tokens to come"
                start, end = starts[move.request], arrives[move.target]
                _draw_move(axes, (start, move.source), (end, move.target), tokens, label)
                arrives[move.target] += tokens
            # Signs of mathematics in it are only signs, and the legend is below it.
            reason = fill(self.reason, _CHARACTERS)
            axes.set_title(reason, loc="left", fontsize="small", pad=24).set_parse_math(False)
        return axes


@dataclass(frozen=True, kw_only=True)
class MigrationPolicy(
    Checked,
    ABC,
    handshake_seconds=NOT_NEGATIVE,
    bandwidth=POSITIVE,
    kv_bytes_per_token=POSITIVE,
    step_seconds=POSITIVE,
    horizon=COUNT,
    stride=COUNT,
    memory_share="(0, 1]",
    tolerance="[0, 1]",
    crowded=POSITIVE,
):
    r"""Plans which running requests move to other decode instances.

    A planner is pure: the same view gives the same plan. It looks at the loads at
    :math:`h = 0, k, 2k, .. H` decode steps from now, with k the ``stride``, and counts the cost
    of a move in decode steps,

    .. math:: \frac{C_{mig}(r)}{T_{exec}} = \frac{1}{t_{step}} \Big(t_{handshake}
              + \frac{N(r) \cdot b_{token}}{B}\Big),

    as STAR does (Wang et al. 2026, Algorithm 1, line 20). No plan fills a target above
    ``memory_share`` of its KV capacity, nor above its slots.

    Attributes:
        handshake_seconds: before a request's first byte travels.
        bandwidth: B, bytes per second between two instances.
        kv_bytes_per_token: of the KV cache, :math:`b_{token}`.
        step_seconds: mean duration of a decode step, :math:`T_{exec}`, where the view does not
            say it. `headway serve` measures it.
        profile: file of `headway profile`; :math:`T_{exec}` is then that of a step with the mean
            instance's requests and load, at every plan of a `ClusterView`.
        horizon: H, decode steps looked ahead.
        stride: decode steps between two looks.
        memory_share: C_mem, as a part of the target's KV capacity.
        tolerance: by how much a move may raise the probability that its target exceeds C_mem at a
            point ahead, `overflow_probabilities`; 1 does not look at it.
        crowded: part of the whole cluster's KV capacity above which nothing moves. Where all of it
            overflows now and then, balanced instances overflow together, and none is left on which
            short requests get through. Queued requests count. So it may be above 1; 100 plans
            always.
    """

    name: ClassVar[str]

    handshake_seconds: float = 0.01
    bandwidth: float = 3.125e9
    kv_bytes_per_token: float = 131_072.0
    step_seconds: float = 0.02
    profile: str | None = None
    horizon: int = 128
    stride: int = 1
    memory_share: float = 0.95
    tolerance: float = 0.01
    crowded: float = 0.8

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing, and a file that is no profile."""
        super().__post_init__()
        if self.profile is not None:
            _profile(self.profile)
        if self.horizon % self.stride:
            raise ValueError(
                f"horizon, {self.horizon}, must be a multiple of stride, {self.stride}"
            )

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """What it has to know of the requests."""

    @abstractmethod
    def decide(self, inputs: MigrationInputs) -> Plan:
        """Return the plan for a cluster given as arrays."""

    def limits(self, inputs: MigrationInputs) -> FloatArray:
        """Return C_mem of every instance in tokens, [G]."""
        return np.asarray(self.memory_share * inputs.room, dtype=np.float64)

    def crowded_plan(self, inputs: MigrationInputs) -> Plan | None:
        """Return that nothing moves if the whole cluster is nearly full, otherwise None."""
        load, room = int(inputs.load.sum()), int(inputs.room.sum())
        if load <= self.crowded * room:
            return None
        share = load / max(room, 1)
        return Plan([], f"{share:.0%} of the cluster's KV capacity is taken: it is crowded")

    def points(self) -> IntArray:
        """Return the decode steps ahead at which loads are looked at, ascending from 0, [P]."""
        if self.needs < Needs.LENGTHS:
            return np.zeros(1, dtype=np.int64)
        return np.arange(0, self.horizon + 1, self.stride)

    def move_steps(self, context: npt.NDArray[Any]) -> FloatArray:
        """Return C_mig / T_exec in decode steps, [n], of requests with so many tokens, [n]."""
        seconds = self.handshake_seconds + context * self.kv_bytes_per_token / self.bandwidth
        return np.asarray(seconds / self.step_seconds, dtype=np.float64)

    def plan(self, view: ClusterView) -> Plan:
        """Return what is to move in a cluster as it is seen.

        Raises:
            ValueError: the view lacks forecasts that the planner needs.
        """
        if self.needs >= Needs.LENGTHS and view.forecast is None:
            raise ValueError(f"{self.name} needs forecasts, which this cluster does not have")
        return self._timed(view).decide(migration_inputs(view, self.points()))

    def _timed(self, view: ClusterView) -> Self:
        """Return the planner with the duration of a step as the cluster is now."""
        if self.profile is None and view.step_seconds is not None:
            return replace(self, step_seconds=view.step_seconds)
        if self.profile is None or len(view.instance) == 0:
            return self
        requests = len(view.instance) / view.n_instances
        seconds = _profile(self.profile).batch.seconds(requests, float(view.kv_load.mean()))
        return replace(self, step_seconds=seconds)


@cache
def _profile(path: str) -> Profile:
    return load_profile(path)


_POLICIES = Registry[MigrationPolicy]("migration policy")

migration_policy = _POLICIES.register
"""Decorator that registers a planner class under the name that configurations use."""


def migration_policy_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_POLICIES)


def create_migration_policy(name: str, **options: Any) -> MigrationPolicy:
    """Return the planner of that name with the given options.

    Raises:
        ValueError: no such planner, no such option, or a value that the planner refuses.
    """
    return _POLICIES.create(name, options)
