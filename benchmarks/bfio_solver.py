"""How near BF-IO's fast solver comes to the optimum, and how long one decision takes.

    python -m benchmarks.bfio_solver [--quick] --json OUT

Contexts are lognormal, lengths geometric. Half of the clusters forecast the true length, half a
curve, of a hazard that differs from request to request.

The gap is measured on random decisions small enough for HiGHS to prove the optimum J*: 2 to 6
instances, 4 to 16 waiting requests, 0 to 3 free slots an instance, 4 to 72 slots, H of 0, 5 and
20 in turn. 7 in 10 clusters are balanced, as BF-IO leaves them; the others are random. It is
(J - J*) / max(J*, G (H + 1)): relative to the optimum, or to one token an instance and step
where the optimum is less than that. A decision that HiGHS does not finish is drawn anew
(``unsolved``). FCFS admits as many requests in order of arrival, each to the first instance with
a free slot.

The time is that of one call of the compiled kernel, Python's dispatch of it included, at H = 80
with 72 slots an instance and a pool of four requests an instance, in a balanced cluster: with 1
free slot an instance on average, Poisson, as in steady state; and with 4 each, a heavy case
(``_4_free``). ``assign_ms`` is `RoutingPolicy.assign` from a view of the same clusters, which
adds the forecasts. Medians of this thread's CPU time, compiled code in place; the arrays are
copied outside of it. ``exact_ms``, of the small decisions, is wall time, ``fast_ms`` beside it
CPU time.
"""

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from benchmarks.support.report import arguments, report
from predictor.forecasts.forecast import Forecast, PointForecast, SurvivalForecast
from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.routing import BFIO
from rescheduler.routing.bfio.exact import imbalance_of, solve_exactly
from rescheduler.routing.inputs import RoutingInputs, empty_target

HORIZON, SLOTS = 80, 72
MEAN_LENGTH = 200
LIMIT = 4096
TIME_LIMIT = 20.0

IntArray = npt.NDArray[np.int64]


def main() -> None:
    options = arguments("gap and time of BF-IO's fast solver").parse_args()
    figures = gaps(60 if options.quick else 600)
    for n_instances in (8, 32, 256):
        figures |= times(n_instances, *((2, 3) if options.quick else (10, 20)))
    report("bfio_solver", figures, options.json)


def gaps(instances: int) -> dict[str, float]:
    generator = np.random.default_rng(2026)
    gap: dict[int, list[float]] = {0: [], 5: [], 20: []}
    exact_ms, fast_ms, unsolved, worse = [], [], 0, 0
    while sum(map(len, gap.values())) < instances:
        n_instances, n_waiting = int(generator.integers(2, 7)), int(generator.integers(4, 17))
        horizon = (0, 5, 20)[sum(map(len, gap.values())) % 3]
        free = generator.integers(0, 4, n_instances)
        slots = int(generator.integers(4, SLOTS + 1))
        view = cluster(generator, n_waiting, slots, free, balanced=generator.random() < 0.7)
        inputs = inputs_of(view, horizon)
        begun = time.perf_counter()
        exact = solve_exactly(inputs, time_limit=TIME_LIMIT)
        exact_ms.append(1e3 * (time.perf_counter() - begun))
        if exact.status != "Optimal":
            unsolved += 1
            continue
        seconds, target = decide(inputs)
        fast_ms.append(1e3 * seconds)
        reached = imbalance_of(inputs, target)
        worse += reached > imbalance_of(inputs, first_come(inputs)) * (1 + 1e-9)
        floor = n_instances * (horizon + 1)
        gap[horizon].append((reached - exact.objective) / max(exact.objective, floor))
    every = np.concatenate(list(gap.values()))
    return {
        "instances": len(every),
        "unsolved": unsolved,
        "gap_mean": every.mean(),
        "gap_max": every.max(),
        "optimal_share": (every < 1e-6).mean(),
        "never_worse_than_fcfs": float(worse == 0),
        **{f"gap_mean_h{horizon}": np.mean(values) for horizon, values in gap.items()},
        "exact_ms": float(np.median(exact_ms)),
        "fast_ms": float(np.median(fast_ms)),
    }


def times(n_instances: int, clusters: int, repeats: int) -> dict[str, float]:
    cases: dict[str, Callable[[np.random.Generator], IntArray]] = {
        "": lambda generator: generator.poisson(1.0, n_instances),
        "_4_free": lambda generator: np.full(n_instances, 4),
    }
    figures = {}
    for case, free in cases.items():
        kernel, assign = [], []
        for seed in range(clusters):
            generator = np.random.default_rng(seed)
            view = cluster(generator, 4 * n_instances, SLOTS, free(generator), balanced=True)
            inputs = inputs_of(view, HORIZON)
            kernel += [decide(inputs)[0] for _ in range(repeats)]
            for _ in range(repeats):
                begun = time.thread_time()
                BFIO(horizon=HORIZON).assign(view)
                assign.append(time.thread_time() - begun)
        figures[f"decision_ms_g{n_instances}{case}"] = 1e3 * float(np.median(kernel))
        figures[f"assign_ms_g{n_instances}{case}"] = 1e3 * float(np.median(assign))
    return figures


def cluster(
    generator: np.random.Generator, n_waiting: int, slots: int, free: IntArray, balanced: bool
) -> ClusterView:
    n_instances = len(free)
    context = contexts(generator, n_instances * slots)
    context += generator.geometric(1 / MEAN_LENGTH, len(context))
    instance = np.repeat(np.arange(n_instances), slots)
    if balanced:
        instance = heaviest_first(context, n_instances, slots)
    running = np.ones(len(context), dtype=np.bool_)
    free = np.minimum(free, slots)
    for g in range(n_instances):
        ended = generator.permutation(np.flatnonzero(instance == g))[: free[g]]
        running[ended] = False
    curves = generator.random() < 0.5
    n_running = int(running.sum())
    return ClusterView(
        slots=np.full(n_instances, slots),
        kv_capacity=np.full(n_instances, UNLIMITED),
        queued=np.zeros(n_instances, dtype=np.int64),
        instance=instance[running],
        prompt_tokens=context[running],
        generated_tokens=np.zeros(n_running, dtype=np.int64),
        forecast=forecast(generator, n_running, curves),
        waiting_prompt_tokens=contexts(generator, n_waiting),
        waiting_generated_tokens=np.zeros(n_waiting, dtype=np.int64),
        waiting_forecast=forecast(generator, n_waiting, curves),
        waited_steps=np.zeros(n_waiting, dtype=np.int64),
    )


def contexts(generator: np.random.Generator, n: int) -> IntArray:
    """Return prompts of 545 tokens in the median and 900 on average, [n]."""
    return np.maximum(generator.lognormal(6.3, 1.0, n), 1.0).astype(np.int64)


def forecast(generator: np.random.Generator, n: int, curves: bool) -> Forecast:
    """Return true lengths, or curves of constant hazards around 1 / `MEAN_LENGTH`."""
    if not curves:
        return PointForecast.new(generator.geometric(1 / MEAN_LENGTH, n).astype(np.float64))
    edges = np.concatenate([np.arange(HORIZON + 2), [LIMIT]])
    hazard = np.clip(generator.lognormal(0.0, 1.0, n) / MEAN_LENGTH, 1e-5, 0.5)
    return SurvivalForecast.new(edges, (1 - hazard[:, None]) ** edges)


def heaviest_first(context: IntArray, n_instances: int, slots: int) -> IntArray:
    """Return the instance of each request, [n], the heaviest placed first, on the least load."""
    instance = np.empty(len(context), dtype=np.int64)
    load, count = np.zeros(n_instances), np.zeros(n_instances)
    for i in np.argsort(-context):
        g = int(np.argmin(np.where(count < slots, load, np.inf)))
        instance[i] = g
        load[g] += context[i]
        count[g] += 1
    return instance


def inputs_of(view: ClusterView, horizon: int) -> RoutingInputs:
    return BFIO(horizon=horizon).inputs(view)


def decide(inputs: RoutingInputs) -> tuple[float, IntArray]:
    used = RoutingInputs._make(array.copy() for array in inputs)
    target, parameters = empty_target(inputs), BFIO().parameters()
    begun = time.thread_time()
    BFIO.kernel(used, parameters, target)
    return time.thread_time() - begun, target


def first_come(inputs: RoutingInputs) -> IntArray:
    """Return FCFS's assignment where KV room is no limit, [n]."""
    places = np.repeat(np.arange(len(inputs.slots)), inputs.slots)
    target = empty_target(inputs)
    admitted = min(len(target), len(places))
    target[:admitted] = places[:admitted]
    return target


if __name__ == "__main__":
    main()
