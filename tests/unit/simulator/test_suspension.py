"""Whom simulated instances suspend: by the engine's own rules, and nobody is forgotten."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_simulator import NO_LIMIT, ReferenceConfig
from simulated_cases import Requests, engine_setup, ordered, reference_cases

from rescheduler.cluster.cluster_view import CANNOT_MOVE
from rescheduler.ordering.expected_rest import LOOKED_STEPS, RestByAge, peak
from rescheduler.ordering.victims import Victims, _Suspended
from rescheduler.routing import create_policy
from rescheduler.simulator.config.simulation_config import read_config
from rescheduler.simulator.engine import suspension
from rescheduler.simulator.engine.engine_state import NONE, PREEMPTED
from rescheduler.simulator.results.metrics import RunResult, run_metrics
from rescheduler.simulator.simulation import RunSetup, Simulation, create_candidates, run, run_setup

RECORDING = str(Path(__file__).parents[3] / "recordings" / "smollm2-135m-instruct.parquet")
JSQ_LOAD = create_policy("jsq_load")
OTHERS = ["rest", "age", "context"]
PREFILLS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "chunked": {"kind": "chunked", "max_batched_tokens": 256},
    "fairbatching": {"kind": "chunked", "max_batched_tokens": 256, "formation": "fairbatching"},
}


def crowded(victim: str, prefill: str = "none", **changes: Any) -> RunSetup:
    """Two instances whose caches overflow, with answers of which a few are long."""
    cluster = {"instances": 2, "slots": 24, "kv_capacity": 3000, "victim": victim}
    trace = {"name": "lognormal", "requests": 150, "output_sigma": 1.3, "output_max": 1500}
    values: dict[str, Any] = {
        "cluster": cluster | changes.pop("cluster", {}),
        "clock": "independent",
        "dispatch": "instant",
        "step_time": {"name": "batch", "a": 0.01, "b": 1e-5, "c": 1e-6},
        "transfer": {"gigabits_per_second": 8, "bytes_per_token": 10_000},
        "trace": trace | {"prompt_max": 300},
        "arrivals": {"kind": "poisson", "rate": 8.0},
        "forecast": {"name": "noisy", "sigma": 1.0},
        "policies": ["jsq_load"],
        "prefill": PREFILLS[prefill],
        "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
        "seeds": 1,
    }
    return run_setup(read_config(values | changes))


def with_victim(setup: RunSetup, victim: Any) -> RunSetup:
    cluster = replace(setup.config.cluster, victim=victim)
    return replace(setup, config=replace(setup.config, cluster=cluster))


def chain(simulation: Simulation, row: int) -> list[int]:
    """The rows of a list of an instance, from its first."""
    rows = []
    while row != NONE:
        rows.append(int(row))
        row = simulation.engine.cluster.requests["next"][row]
    return rows


def paused(simulation: Simulation, seconds: float) -> Iterator[float]:
    """Simulate so many seconds at a time, to the end."""
    now = seconds
    while simulation.advance(now):
        yield now
        now += seconds


@given(reference_cases(), st.sampled_from(OTHERS))
def test_every_request_ends_whoever_is_suspended(
    case: tuple[ReferenceConfig, Requests], victim: str
) -> None:
    config, requests = case
    setup = with_victim(engine_setup(config, requests), victim)
    result = run(setup, JSQ_LOAD, seed=0)
    assert ordered(result, "output") == [output for _, _, output in requests]
    assert not np.isnan(result.requests.end).any()
    assert result.tokens == sum(output for _, _, output in requests)


@given(reference_cases(), st.sampled_from(OTHERS))
def test_the_choice_changes_nothing_where_nothing_overflows(
    case: tuple[ReferenceConfig, Requests], victim: str
) -> None:
    config, requests = case
    setup = engine_setup(replace(config, capacity=NO_LIMIT), requests)
    as_vllm = run(setup, JSQ_LOAD, seed=0)
    other = run(with_victim(setup, victim), JSQ_LOAD, seed=0)
    assert as_vllm.preemptions == other.preemptions == 0
    for field, values in zip(as_vllm.requests._fields, as_vllm.requests, strict=True):
        np.testing.assert_array_equal(values, getattr(other.requests, field), err_msg=field)


@pytest.mark.parametrize("victim", OTHERS)
def test_every_request_ends_where_batches_have_an_order_of_their_own(victim: str) -> None:
    result = run(crowded(victim, "fairbatching"), JSQ_LOAD, seed=1)
    assert len(result.requests.number) == 150 and not np.isnan(result.requests.end).any()
    assert result.preemptions > 10


@pytest.mark.parametrize("victim", OTHERS)
@pytest.mark.parametrize(
    ("prefill", "cluster"),
    [
        ("none", {}),
        ("none", {"prefix_caching": True, "block_tokens": 16}),
        ("chunked", {"prefix_caching": True, "dispatch_s": 0.05}),
    ],
)
def test_nobody_begins_before_the_one_whose_limit_passed_first(
    victim: str, prefill: str, cluster: dict[str, Any]
) -> None:
    simulation = Simulation(crowded(victim, prefill, cluster=cluster), JSQ_LOAD, seed=1)
    foremost = [(NONE, 0), (NONE, 0)]  # of those whose limit has passed, and since which step
    admissions, compared = 0, 0
    for _ in paused(simulation, 0.005):  # less than a step lasts
        state = simulation.engine.cluster
        for g, instance in enumerate(state.instances):
            runs = state.slot_request[g, : instance["decoding"]].tolist()
            runs += chain(simulation, instance["filling"])
            row, since = foremost[g]
            admitted = state.requests["admitted"]
            before = admitted[row] if row in runs else admitted.max() + 1
            began = [one for one in runs if admissions <= admitted[one] < before]
            first = [one for one in began if state.requests["preemptions"][one] == 0]
            overdue = row != NONE and since + LOOKED_STEPS < instance["steps"] - 1
            assert not (overdue and first)
            compared += overdue
            waiting = chain(simulation, instance["suspended"])
            waiting += [
                row
                for row in chain(simulation, instance["queue_head"])
                if state.requests["resumes"][row] == PREEMPTED
            ]
            late = [one for one in waiting if state.requests["until"][one] <= instance["steps"]]
            row = min(late, key=lambda one: state.requests["until"][one], default=NONE)
            if any(state.requests["until"][one] == suspension._FOR_GOOD for one in runs):
                row = NONE  # one at a time is kept for good
            foremost[g] = row, since if row == foremost[g][0] else int(instance["steps"])
        admissions = int(state.scalars["admissions"][0])
    result = simulation.result("")
    assert len(result.requests.number) == 150 and not np.isnan(result.requests.end).any()
    assert result.preemptions > 10
    assert victim == "rest" or compared > 0, "nobody was suspended for as long as its limit"


class SameState:
    """What `Victims` reads of vLLM's scheduler, from a simulated instance."""

    def __init__(self, simulation: Simulation, g: int, victim: str) -> None:
        state, forecast = simulation.engine.cluster, simulation.engine.rests.forecast
        instance, capacity = state.instances[g], simulation.engine.rules.kv_capacity
        self.vllm_config = SimpleNamespace(
            additional_config={"headway": {"victim": victim}},
            scheduler_config=SimpleNamespace(policy="fcfs"),
        )
        self.block_size, self.failures, self.connector = 1, 0, None
        held = instance["load"] + instance["arriving_tokens"] + instance["leaving_tokens"]
        pool = SimpleNamespace(
            num_gpu_blocks=capacity, get_num_free_blocks=lambda: int(capacity - held)
        )
        caches = simulation.engine.rules.prefix_caching
        self.kv_cache_manager = SimpleNamespace(block_pool=pool, enable_caching=caches)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
        self.left: dict[int, float] = {}
        self.running: list[Any] = []
        self.asks = forecast.kind != 0
        self.victims = Victims(self)
        self.victims._step = int(instance["steps"])
        self.victims._lengths = simulation._lengths[g]
        slots = state.slot_request[g, : instance["decoding"]]
        for slot, row in enumerate(slots):
            left = state.slot_end[g, slot] - instance["steps"]
            context = state.requests["context"][row] + instance["grown"]
            self.running.append(self._request(state, row, context, left, False))
            self._keep(state, row, instance["steps"])
        self.running.sort(key=lambda request: int(state.requests["admitted"][request.row]))
        for row in chain(simulation, instance["filling"]):
            self.running.append(self._held(state, row, True))
            self._keep(state, row, instance["steps"])
        for row in chain(simulation, instance["suspended"]):
            rest, until = state.requests["rest"][row], int(state.requests["until"][row])
            since = until - int(state.requests["allowed"][row])
            self.victims._suspended[str(row)] = _Suspended(
                self._held(state, row, False), float(rest), since, until
            )

    def _keep(self, state: Any, row: int, steps: int) -> None:
        until = int(state.requests["until"][row])
        if until > steps:
            for_good = until == suspension._FOR_GOOD
            self.victims._kept_until[str(row)] = inf if for_good else until

    def _held(self, state: Any, row: int, filling: bool) -> Any:
        left = state.requests["output"][row] - state.requests["generated"][row]
        return self._request(state, row, state.requests["context"][row], left, filling)

    def _request(self, state: Any, row: int, context: int, left: int, filling: bool) -> Any:
        generated = int(state.requests["output"][row] - left)
        self.left[int(row)] = float(left)
        return SimpleNamespace(
            row=int(row),
            request_id=str(row),
            num_tokens=int(context),
            num_output_tokens=generated,
            max_tokens=1_000_000,
            is_prefill_chunk=filling,
            kv_transfer_params=None,
        )

    def part(self, kind: Any) -> Any:
        def means(requests: Any) -> Any:
            known = [self.left[one.row] if self.asks else np.nan for one in requests]
            return np.array(known, dtype=np.float64)

        return SimpleNamespace(means=means)


@pytest.mark.parametrize("victim", OTHERS)
@pytest.mark.parametrize("forecast", ["oracle", "none"])
@pytest.mark.parametrize(("prefill", "caches"), [("none", False), ("chunked", True)])
def test_the_engines_part_decides_alike_in_the_same_state(
    victim: str, forecast: str, prefill: str, caches: bool
) -> None:
    cluster = {"prefix_caching": caches}
    setup = crowded(victim, prefill, forecast={"name": forecast}, cluster=cluster)
    simulation = Simulation(setup, JSQ_LOAD, seed=2)
    chosen = came_back = kept = 0
    for _ in paused(simulation, 0.17):
        instances = simulation.engine.cluster.instances
        instances["unlearned"] = instances["learn_after"] + 1
        simulation._learn()  # all that has ended, as the engine's part does when it is asked
        parts = simulation.engine
        rules, rests, cluster = parts.rules, parts.rests, parts.cluster
        for g, instance in enumerate(cluster.instances):
            there = SameState(simulation, g, victim)
            decoding = int(instance["decoding"])
            slot = suspension.longest_rest(rules, rests, cluster, g)
            expected = there.victims._fitting()
            for request in there.running:
                state = request.row, request.num_output_tokens, request.num_tokens
                by_age = suspension.rest_by_age(rests, cluster, g, *state)
                assert there.victims._rests_by_age([request])[0] == pytest.approx(by_age)
            keeps = suspension.keeps_cache(rules, rests, cluster, g)
            assert keeps == bool(there.victims._keeping_cache())
            kept += keeps
            crowd = there.running[:decoding]
            there.running[:], all_running = crowd, there.running[:]
            there.victims._order()
            if decoding > 1 and there.victims._sorted_at:
                assert there.running[-1].row == cluster.slot_request[g, slot]
                chosen += 1
            head = instance["queue_head"]
            if head != NONE and cluster.requests["resumes"][head] != NONE:
                continue
            cluster.instances["looked"][g] = -LOOKED_STEPS
            if not all_running or instance["suspended"] == NONE:
                continue
            suspension.bring_back(rules, rests, cluster, g)
            queue = chain(simulation, cluster.instances["queue_head"][g])
            back = [row for row in queue if cluster.requests["resumes"][row] == PREEMPTED]
            assert [str(row) for row in back] == expected
            came_back += len(back)
    assert chosen > 20
    assert came_back > 5
    assert (kept > 5) == caches


@given(
    st.lists(st.tuples(st.integers(1, 200_000), st.floats(1.0, 40_000.0)), min_size=1, max_size=64)
)
def test_the_peak_is_the_engines(requests: list[tuple[int, float]]) -> None:
    contexts, rests = np.array(requests, dtype=np.float64).T.copy()
    found = suspension.peak(contexts, rests, len(requests))
    assert found == pytest.approx(peak(contexts, rests), rel=1e-12)


@pytest.mark.parametrize("victim", OTHERS)
@pytest.mark.parametrize("forecast", ["oracle", "none"])
def test_shorter_ones_pass_a_long_request_for_a_time_however_many_come(
    victim: str, forecast: str
) -> None:
    """20 requests of 60 tokens a second beside one of 2,000, where 30 of them fit."""

    def ends_after(victim: str, number: int) -> float:
        rng = np.random.default_rng(0)
        arrivals = np.cumsum(rng.exponential(0.05, number)).tolist()
        short = [(arrival, 100, 60) for arrival in arrivals]
        requests = sorted([*short, (5.0, 400, 2_000)])
        config = ReferenceConfig(
            1, 64, 3_000, "independent", "instant", prefill="chunked", max_batched_tokens=256,
            a=0.01, b=1e-5, c=1e-6,
        )  # fmt: skip
        setup = engine_setup(config, requests)
        changed = replace(setup.config.cluster, victim=victim)
        setup = replace(setup, config=replace(setup.config, cluster=changed))
        if forecast == "none":
            setup = replace(setup, config=replace(setup.config, forecast={"name": "none"}))
        result = run(setup, JSQ_LOAD, seed=0)
        long = [one[2] for one in requests].index(2_000)
        return float(ordered(result, "end")[long]) - 5.0

    first, later = ends_after(victim, 1_000), ends_after(victim, 3_000)
    assert later <= first + 1.0 <= 2.0 * ends_after("newest", 1_000)


def suspended_by(victim: str, forecast: str) -> RunResult:
    setup = crowded(victim, forecast={"name": forecast})
    return run(setup, JSQ_LOAD, seed=0)


def test_short_requests_are_suspended_less_and_gaps_have_an_end() -> None:
    as_vllm, other = suspended_by("newest", "oracle"), suspended_by("rest", "oracle")
    short = [np.median(result.requests.output) for result in (as_vllm, other)]
    suspended = [
        int(result.requests.preemptions[result.requests.output <= most].sum())
        for result, most in zip((as_vllm, other), short, strict=True)
    ]
    assert suspended[1] < suspended[0] / 2
    figures = run_metrics(other)
    assert figures["itl_p99"] <= figures["itl_max"] <= figures["latency"] * 150


@pytest.mark.parametrize("victim", OTHERS)
def test_what_is_suspended_does_not_move_and_what_moves_is_not_suspended(victim: str) -> None:
    full = {"tolerance": 1, "crowded": 100}  # they move though memory is full
    planners = [
        {"name": "star", "prediction": False, **full},
        {"name": "survival", "stride": 8, **full},
    ]
    changes: dict[str, Any] = {
        "cluster": {"instances": 3, "block_tokens": 16},
        "migration": {"interval": 2, "planners": planners},
        "arrivals": {"kind": "poisson", "rate": 11.0},
    }
    setup = crowded(victim, **changes)
    for policy, planner, own, _ in create_candidates(setup).values():
        simulation = Simulation(own, policy, 3, planner)
        for _ in paused(simulation, 0.2):
            state = simulation.engine.cluster
            moving = state.moves["request"][: state.scalars["moving"][0]].tolist()
            view, numbers = simulation.view(), simulation.running_numbers()
            for instance in state.instances:
                rows = chain(simulation, instance["suspended"])
                assert not set(rows) & set(moving)
                assert (state.requests["resumes"][rows] == PREEMPTED).all()
                suspended = np.isin(numbers, state.requests["number"][rows])
                assert suspended.sum() == len(rows)
                assert view.since_move is not None
                assert (view.since_move[suspended] == CANNOT_MOVE).all()
        result = simulation.result("")
        assert not np.isnan(result.requests.end).any()
        assert result.preemptions > 0 and result.migrations > 0


def test_forecasts_by_the_past_say_whom_to_suspend() -> None:
    trace = {"name": "replay", "requests": 150, "recording": RECORDING}
    result = run(crowded("rest", trace=trace, forecast={"name": "past"}), JSQ_LOAD, seed=0)
    assert len(result.requests.number) == 150 and not np.isnan(result.requests.end).any()
    assert result.preemptions > 10


def test_lengths_that_a_limit_has_cut_count_as_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[int, bool]] = []
    ended = RestByAge.ended

    def watched(self: RestByAge, tokens: int, was_cut: bool) -> None:
        noted.append((tokens, was_cut))
        ended(self, tokens, was_cut)

    monkeypatch.setattr(RestByAge, "ended", watched)
    trace = {"name": "replay", "requests": 300, "recording": RECORDING}
    setup = crowded("age", trace=trace, forecast={"name": "none"})
    result = run(setup, JSQ_LOAD, seed=0)
    recorded = setup.trace.recorded  # type: ignore[attr-defined]
    assert sorted(tokens for tokens, _ in noted) == sorted(result.requests.output.tolist())
    (limit,) = set(recorded.max_tokens.tolist())
    assert {was_cut for tokens, was_cut in noted if tokens >= limit} == {True}
    assert {was_cut for tokens, was_cut in noted if tokens < limit} == {False}
