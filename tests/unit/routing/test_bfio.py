"""BF-IO: the exact solver against brute force, the fast one against the exact, and the policy."""

import subprocess
import sys
from dataclasses import replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from routing_views import view_of

from predictor.forecasts.forecast import Forecast, PointForecast, SurvivalForecast
from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.routing import BFIO, Needs, create_policy
from rescheduler.routing.bfio.exact import solve_exactly
from rescheduler.routing.bfio.fast import FURTHEST
from rescheduler.routing.inputs import RoutingInputs
from rescheduler.routing.policy import spaced_points

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def cluster(
    sizes: list[list[int]],
    waiting: list[int],
    slots: int | list[int],
    *,
    left: list[list[float]] | None = None,
    waiting_left: list[float] | None = None,
    room: int | list[int] = UNLIMITED,
    waited: list[int] | None = None,
) -> ClusterView:
    """A cluster with so many free slots and so much free room beside the running requests."""
    running = np.array([size for instance in sizes for size in instance], dtype=np.int64)
    instance = np.repeat(np.arange(len(sizes)), [len(requests) for requests in sizes])
    tokens = [1e9] * len(running) if left is None else [n for row in left for n in row]
    load = np.bincount(instance, weights=running, minlength=len(sizes)).astype(np.int64)
    free = np.broadcast_to(np.asarray(room, dtype=np.int64), len(sizes))
    return view_of(
        np.asarray(slots) + np.array([len(requests) for requests in sizes]),
        instance,
        running,
        waiting,
        kv_capacity=np.where(free == UNLIMITED, UNLIMITED, free + load),
        forecast=PointForecast.new(tokens),
        waiting_forecast=PointForecast.new(waiting_left or [1e9] * len(waiting)),
        waited_steps=np.array(waited or [0] * len(waiting), dtype=np.int64),
    )


def random_cluster(
    generator: np.random.Generator,
    n_instances: int,
    n_waiting: int,
    slots: IntArray,
    *,
    running: int = 12,
    curves: bool = False,
    tight: bool = False,
) -> ClusterView:
    """Lognormal contexts, geometric lengths: true ones, or hazards that differ a lot."""

    def forecast(n: int) -> Forecast:
        if not curves:
            return PointForecast.new(generator.geometric(1 / 60, n).astype(np.float64))
        edges = np.arange(129)
        hazard = np.clip(generator.lognormal(-4, 1, n), 1e-4, 0.5)
        return SurvivalForecast.new(edges, (1 - hazard[:, None]) ** edges)

    def contexts(n: int) -> IntArray:
        return np.maximum(generator.lognormal(6, 1, n), 1).astype(np.int64)

    size, waiting = contexts(n_instances * running), contexts(n_waiting)
    room = (generator.uniform(0, 1.5, n_instances) * slots * waiting.mean()).astype(np.int64)
    view = cluster(
        size.reshape(n_instances, running).tolist(),
        waiting.tolist(),
        slots.tolist(),
        room=room.tolist() if tight else UNLIMITED,
    )
    return replace(view, forecast=forecast(len(size)), waiting_forecast=forecast(n_waiting))


@st.composite
def clusters(draw: st.DrawFn, most_waiting: int) -> ClusterView:
    """Small clusters of all kinds: crowded or not, with KV room or short of it."""
    n_instances = draw(st.integers(1, 3))
    return random_cluster(
        np.random.default_rng(draw(st.integers(0, 2**32))),
        n_instances,
        draw(st.integers(1, most_waiting)),
        np.array(draw(st.lists(st.integers(0, 3), min_size=n_instances, max_size=n_instances))),
        running=draw(st.integers(0, 4)),
        curves=draw(st.booleans()),
        tight=draw(st.booleans()),
    )


def inputs_of(view: ClusterView, horizon: int | None) -> RoutingInputs:
    policy = BFIO(horizon=horizon)
    return policy.inputs(view)


def assigned(view: ClusterView, **options: object) -> IntArray:
    return create_policy("bfio", **options).assign(view).instance


def imbalance(view: ClusterView, instance: IntArray, horizon: int | None) -> float:
    """J, written down once more: from the forecasts of single requests."""
    steps = spaced_points(FURTHEST, 1.1) if horizon is None else np.arange(horizon + 1)
    placed, weight, refill = instance >= 0, np.ones(len(steps)), np.zeros(len(steps))
    if horizon is None:
        weight, refill = weights_and_refills(view, steps)
    load = np.zeros((view.n_instances, len(steps)))
    assert view.forecast is not None and view.waiting_forecast is not None
    alive, waiting = view.forecast.at(steps), view.waiting_forecast.at(steps)
    ahead = alive * (view.context_tokens[:, None] + steps) + (1 - alive) * refill
    np.add.at(load, view.instance, ahead)
    brought = waiting * (view.waiting_prompt_tokens[:, None] + steps) + (1 - waiting) * refill
    np.add.at(load, instance[placed], brought[placed])
    return float((weight * (len(load) * load.max(axis=0) - load.sum(axis=0))).sum())


def weights_and_refills(view: ClusterView, steps: IntArray) -> tuple[FloatArray, FloatArray]:
    """What `foresight` returns, written down once more, to the last step."""
    assert view.forecast is not None and view.waiting_forecast is not None
    sizes, free = view.waiting_prompt_tokens, np.clip(view.slots - view.running, 0, view.n_waiting)
    shared = min(view.n_waiting, free.sum()) * free / max(free.sum(), 1)
    ends = np.zeros((view.n_instances, len(steps)))
    np.add.at(ends, view.instance, 1 - view.forecast.at(steps))
    if view.n_waiting:
        ends += shared[:, None] * (1 - view.waiting_forecast.at(steps)).mean(axis=0)
    share = min(sizes.mean() / view.context_tokens.mean(), 1.0) if len(view.instance) else 1.0
    weight = np.exp(-share * ends).mean(axis=0)
    weight[weight < 1e-3] = 0.0
    crowded = view.n_waiting > free.sum()
    refill = np.median(sizes) + steps / 2 if crowded else np.zeros(len(steps))
    return weight * np.diff(steps, prepend=-1), refill


def feasible(view: ClusterView, instance: IntArray) -> bool:
    placed = instance[instance >= 0]
    brought = view.waiting_prompt_tokens[instance >= 0]
    tokens = np.bincount(placed, weights=brought, minlength=view.n_instances)
    counts = np.bincount(placed, minlength=view.n_instances)
    free, room = view.slots - view.running, view.kv_capacity - view.kv_load
    return bool((counts <= free).all() and (tokens <= room).all())


def by_brute_force(view: ClusterView, horizon: int | None) -> tuple[int, float]:
    """The most that can be admitted, and the least J with so many."""
    outcomes = []
    for choice in product(range(-1, view.n_instances), repeat=view.n_waiting):
        instance = np.array(choice, dtype=np.int64)
        if feasible(view, instance):
            outcomes.append((-int((instance >= 0).sum()), imbalance(view, instance, horizon)))
    fewest, least = min(outcomes)
    return -fewest, least


def fcfs(view: ClusterView) -> IntArray:
    """In order of arrival, each on the first instance where it fits."""
    free, room = view.slots - view.running, view.kv_capacity - view.kv_load
    instance = np.full(view.n_waiting, -1)
    for i, size in enumerate(view.waiting_prompt_tokens):
        fitting = np.flatnonzero((free > 0) & (room >= size))
        if len(fitting):
            instance[i] = fitting[0]
            free[fitting[0]] -= 1
            room[fitting[0]] -= size
    return instance


@given(view=clusters(most_waiting=5), horizon=st.sampled_from([None, 0, 1, 7]))
def test_the_exact_solver_finds_what_brute_force_finds(
    view: ClusterView, horizon: int | None
) -> None:
    solution = solve_exactly(inputs_of(view, horizon))
    most, least = by_brute_force(view, horizon)

    assert feasible(view, solution.instance)
    assert (solution.instance >= 0).sum() == most
    assert solution.objective == pytest.approx(least, abs=0.2)
    assert solution.objective == pytest.approx(imbalance(view, solution.instance, horizon))
    assert (solution.status, solution.source) == ("Optimal", "highs")
    assert solution.gap == 0
    assert solution.bound <= solution.objective


@given(view=clusters(most_waiting=9), horizon=st.sampled_from([None, 0, 1, 20]))
def test_the_fast_solver_is_between_fcfs_and_the_exact_one(
    view: ClusterView, horizon: int | None
) -> None:
    fast, exact = assigned(view, horizon=horizon), solve_exactly(inputs_of(view, horizon))
    first_come = fcfs(view)
    admitted, most = (fast >= 0).sum(), (exact.instance >= 0).sum()

    assert feasible(view, fast)
    assert (first_come >= 0).sum() <= admitted <= most
    if (view.kv_capacity == UNLIMITED).all():
        assert admitted == min(view.n_waiting, (view.slots - view.running).sum())
    reached = imbalance(view, fast, horizon)
    if admitted == (first_come >= 0).sum():
        assert reached <= imbalance(view, first_come, horizon) * (1 + 1e-9) + 1e-6
    if admitted == most:
        assert reached >= exact.bound - 1e-6


def test_the_fast_solver_is_near_the_optimum() -> None:
    gaps = []
    for seed in range(60):
        generator = np.random.default_rng(seed)
        n_instances, horizon = int(generator.integers(2, 7)), (0, 5, 20, None)[seed % 4]
        slots = generator.integers(0, 4, n_instances)
        view = random_cluster(
            generator, n_instances, int(generator.integers(4, 15)), slots, curves=seed % 2 == 0
        )
        exact = solve_exactly(inputs_of(view, horizon)).objective
        reached = imbalance(view, assigned(view, horizon=horizon), horizon)
        steps = 20 if horizon is None else horizon + 1
        gaps.append((reached - exact) / max(exact, n_instances * steps))
    assert np.mean(gaps) < 0.01
    assert np.median(gaps) < 1e-6


@given(
    sizes=st.lists(st.integers(1, 12), min_size=5, max_size=12),
    n_instances=st.integers(2, 3),
    solver=st.sampled_from(["fast", "exact"]),
)
@example([22, 22, 22, 22, 5, 14], 3, "fast")  # two instances share the maximum
@example([10, 10, 10, 6, 1, 10, 10, 10, 10], 3, "exact")
def test_lemma_1_holds_whatever_the_sizes(sizes: list[int], n_instances: int, solver: str) -> None:
    slots = len(sizes) // n_instances
    view = cluster([[]] * n_instances, sizes, slots)
    instance = assigned(view, horizon=0, solver=solver)

    brought = np.array(sizes)[instance >= 0]
    load = np.bincount(instance[instance >= 0], weights=brought)
    assert load.max() - load.min() <= max(sizes)


@pytest.mark.parametrize("solver", ["fast", "exact"])
def test_looking_ahead_places_where_room_will_be(solver: str) -> None:
    view = cluster([[100], [90]], [50], slots=1, left=[[2], [1e9]])

    assert assigned(view, horizon=0, solver=solver).tolist() == [1]
    assert assigned(view, horizon=10, solver=solver).tolist() == [0]


def test_of_equal_places_the_least_loaded_and_then_the_first_is_taken() -> None:
    assert assigned(cluster([[100], [20], [60]], [5], 1), horizon=5).tolist() == [1]
    assert assigned(cluster([[100], [20], [20]], [5], 1), horizon=5).tolist() == [1]
    assert assigned(cluster([[], [], []], [5], 1), horizon=0).tolist() == [0]


def test_slots_that_will_be_filled_again_are_not_taken_for_room() -> None:
    """Those on the first instance end soon, but requests of their size wait for their slots."""
    view = cluster(
        [[100] * 5, [90] * 5],
        [130, 70, 100, 100, 100, 100],
        slots=1,
        left=[[4] * 5, [40] * 5],
        waiting_left=[60] * 6,
    )
    for solver in ("fast", "exact"):
        assert assigned(view, horizon=0, solver=solver)[:2].tolist() == [1, 0]
        assert assigned(view, horizon=80, solver=solver)[0] == 0
        assert assigned(view, solver=solver)[0] != 0


@given(
    seed=st.integers(0, 2**32),
    bound=st.integers(0, 6),
    arrivals=st.integers(1, 4),
    solver=st.sampled_from(["fast", "fast", "exact"]),
)
def test_nobody_waits_longer_than_the_bound_but_for_those_who_have_too(
    seed: int, bound: int, arrivals: int, solver: str
) -> None:
    generator = np.random.default_rng(seed)
    sizes, ages = [], []
    for _ in range(15):
        sizes += generator.integers(1, 2000, arrivals).tolist()
        ages += [0] * arrivals
        loads = generator.integers(1, 5000, 3)
        slots = generator.integers(0, 3, 3)
        view = cluster([[int(load)] for load in loads], sizes, slots.tolist(), waited=ages)
        instance = assigned(view, horizon=0, starvation=bound, solver=solver)

        admitted, waited = instance >= 0, np.array(ages)
        starving = waited >= bound
        if (starving & ~admitted).any():
            assert admitted.sum() == slots.sum()
            assert waited[admitted].min(initial=10**9) >= waited[starving & ~admitted].max()
        sizes = [size for size, gone in zip(sizes, admitted, strict=True) if not gone]
        ages = [age + 1 for age, gone in zip(ages, admitted, strict=True) if not gone]


@pytest.mark.parametrize("solver", ["fast", "exact"])
def test_a_request_that_fits_nobody_waits_until_it_starves(solver: str) -> None:
    misfit = cluster([[1000], [980]], [5000, 10, 20], slots=[0, 1], waited=[7, 0, 0])

    assert assigned(misfit, horizon=0, solver=solver)[0] == -1
    assert assigned(misfit, horizon=0, solver=solver, starvation=8)[0] == -1
    assert assigned(misfit, horizon=0, solver=solver, starvation=7).tolist() == [1, -1, -1]


@pytest.mark.parametrize("solver", ["fast", "exact"])
def test_an_instance_that_holds_more_than_its_cache_takes_nothing(solver: str) -> None:
    """As it does while it preempts, or while requests that left it are still being copied."""
    view = cluster([[120], [50]], [20, 30], slots=3, room=[-20, 950])
    assert assigned(view, solver=solver).tolist() == [1, 1]


def test_the_exact_solver_at_its_time_limit_is_no_worse_than_fast() -> None:
    view = random_cluster(np.random.default_rng(1), 6, 40, np.full(6, 3))
    inputs = inputs_of(view, 20)
    solution = solve_exactly(inputs, time_limit=0.2)

    assert solution.status == "Time limit reached"
    assert 0 < solution.gap <= 1
    assert feasible(view, solution.instance)
    assert (solution.instance >= 0).sum() == 18
    assert solution.objective <= imbalance(view, assigned(view, horizon=20), 20) + 1e-6


def test_of_a_pool_past_all_bounds_the_oldest_are_chosen_from() -> None:
    sizes = np.random.default_rng(0).integers(1, 3000, 5000)
    instance = assigned(cluster([[2000], [2500]], sizes.tolist(), slots=2), horizon=0)

    assert (instance >= 0).sum() == 4
    assert (instance[512:] < 0).all()


def test_a_small_request_far_back_in_the_pool_takes_the_room_that_is_left() -> None:
    view = cluster([[10], [10]], [500] * 2000 + [40], slots=3, room=[50, 30])

    assert assigned(view, horizon=0).tolist() == [-1] * 2000 + [0]


def test_only_lookahead_needs_forecasts() -> None:
    blind = replace(cluster([[100], [50]], [10], 1), forecast=None, waiting_forecast=None)

    assert BFIO(horizon=0).needs == Needs.LOADS
    assert BFIO(horizon=1).needs == Needs.FORECASTS
    for solver in ("fast", "exact"):
        assert assigned(blind, horizon=0, solver=solver).tolist() == [1]
        with pytest.raises(ValueError, match="forecasts"):
            assigned(blind, horizon=5, solver=solver)


def test_the_milp_solver_is_loaded_only_when_it_is_asked() -> None:
    code = "import sys, rescheduler.routing; sys.exit('highspy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
