"""The reference simulator against runs worked out by hand.

Unless a test says otherwise a step takes one second, so that times can be counted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from reference_simulator import (
    ReferenceConfig,
    ReferenceResult,
    StepRecord,
    reference_run,
)

from rescheduler.cluster.cluster_view import Assignment, ClusterView
from rescheduler.routing.policy import Needs, RoutingPolicy, create_policy


@dataclass(frozen=True)
class FirstFit(RoutingPolicy):
    """First come, first served, by the first instance that has a place; nobody overtakes.

    Keeps what it is shown.
    """

    name = "first_fit"
    needs = Needs.LOADS
    wait: int = 0  # steps that every request but the first has to have waited
    seen: list[ClusterView] = field(default_factory=list)

    def assign(self, view: ClusterView) -> Assignment:
        self.seen.append(view)
        sizes = view.waiting_prompt_tokens + view.waiting_generated_tokens
        slots, room = view.slots - view.running, view.kv_capacity - view.kv_load
        target = np.full(view.n_waiting, -1)
        for i in range(view.n_waiting):
            there = np.flatnonzero(view.instant | ((slots > 0) & (room >= sizes[i])))
            if not len(there) or (view.dispatched and view.waited_steps[i] < self.wait):
                break
            target[i] = there[0]
            slots[target[i]] -= 1
            room[target[i]] -= sizes[i]
        return Assignment(target)


def loads(result: ReferenceResult) -> list[list[int]]:
    return [step.loads for step in result.steps]


def column(result: ReferenceResult, name: str) -> list[float]:
    return [getattr(request, name) for request in result.requests]


def alone(
    requests: Sequence[tuple[float | None, int, int]],
    config: ReferenceConfig,
    policy: RoutingPolicy | None = None,
) -> ReferenceResult:
    """Run on one instance, so that L and its only load are the same."""
    assert config.instances == 1
    return reference_run(config, requests, policy or FirstFit())


def test_a_barrier_step_takes_the_slowest_instance_plus_the_mean_load() -> None:
    # t = 1 + new/2 + L/4, and L's mean/2; one slot each, so request 2 waits.
    #  0.0  loads 4, 8: t = 2.5, 3.5; mean 6:   3.5 + 3.0  = 6.5    (request 1 ends)
    #  6.5  loads 5, 2: t = 2.75, 2;  mean 3.5: 2.75 + 1.75 = 4.5   (0 and 2 end)
    config = ReferenceConfig(2, 1, pool_limit=3, a=1, b=0.5, c=0.25, mean_context=0.5)
    result = reference_run(config, [(None, 4, 2), (None, 8, 1), (None, 2, 1)], FirstFit())
    assert loads(result) == [[4, 8], [5, 2]]
    assert [(step.time, step.seconds) for step in result.steps] == [(0.0, 6.5), (6.5, 4.5)]
    assert column(result, "instance") == [0, 1, 1]
    assert column(result, "arrival") == [0.0, 0.0, 0.0]
    assert column(result, "placed") == column(result, "start") == [0.0, 0.0, 6.5]
    assert column(result, "first_token") == [6.5, 6.5, 11.0]
    assert column(result, "end") == [11.0, 6.5, 11.0]
    assert result.tokens == 4
    # G·max − sum = 4, 3; max − min = 4, 3; 1 − mean/max = 1 − 6/8, 1 − 3.5/5
    assert (result.imbalance, result.max_minus_min) == (3.5, 3.5)
    assert result.idle_share == pytest.approx(0.275)


def test_an_instances_own_step_has_its_own_load_in_place_of_the_mean() -> None:
    # t = 1 + L + L: 9 and 5 seconds; then request 0 is alone with L = 5: 11 seconds.
    config = ReferenceConfig(2, 1, clock="independent", c=1.0, mean_context=1.0)
    result = reference_run(config, [(None, 4, 2), (None, 2, 1)], FirstFit())
    assert result.steps == [
        StepRecord(0.0, 9.0, [4, 2], [1, 1]),
        StepRecord(0.0, 5.0, [4, 2], [1, 1]),
        StepRecord(9.0, 11.0, [5, 0], [1, 0]),
    ]
    assert column(result, "end") == [20.0, 5.0]


def test_a_pool_sees_arrivals_at_step_ends_or_at_once() -> None:
    requests = [(0.0, 1, 2), (0.5, 1, 1)]
    barrier = reference_run(ReferenceConfig(2, 1), requests, FirstFit())
    assert column(barrier, "placed") == column(barrier, "start") == [0.0, 1.0]
    assert column(barrier, "end") == [2.0, 2.0]
    own = reference_run(ReferenceConfig(2, 1, clock="independent"), requests, FirstFit())
    assert column(own, "placed") == column(own, "start") == [0.0, 0.5]
    assert column(own, "end") == [2.0, 1.5]


@pytest.mark.parametrize("clock", ["barrier", "independent"])
def test_the_pool_is_filled_up_to_its_limit_at_every_event(clock: str) -> None:
    # All are there at 0, and there is room for all, but the pool shows one at a time.
    config = ReferenceConfig(1, 3, clock=clock, pool_limit=1)  # type: ignore[arg-type]
    arrived = alone([(0.0, 1, 3), (0.0, 1, 1), (0.0, 1, 1)], config)
    assert column(arrived, "arrival") == [0.0, 0.0, 0.0]
    assert column(arrived, "placed") == column(arrived, "start") == [0.0, 1.0, 2.0]
    revealed = alone([(None, 1, 3), (None, 1, 1), (None, 1, 1)], config)
    assert column(revealed, "arrival") == column(revealed, "placed") == [0.0, 1.0, 2.0]


def test_a_request_counts_the_steps_it_has_waited() -> None:
    # Request 1 is seen from 1.0 on, when the first step has ended, and has waited 2 steps at 3.
    policy = FirstFit(wait=2)
    result = alone([(0.0, 1, 9), (0.5, 1, 1)], ReferenceConfig(1, 2), policy)
    assert [view.waited_steps.tolist() for view in policy.seen] == [[0], [0], [1], [2]]
    assert column(result, "placed") == [0.0, 3.0]


def test_the_policy_sees_contexts_queues_and_what_truly_remains() -> None:
    # Capacity 10, slots 3, drift 2. Requests 0 and 1 run at 0 (4 + 4); after a step they hold
    # 6 + 6 > 10, so 1 is preempted; request 2, of 3 tokens, is then shown an instance with no
    # room: 10 − 6 − 6 < 0.
    policy = FirstFit()
    config = ReferenceConfig(1, 3, capacity=10, drift=(2,))
    alone([(0.0, 4, 3), (0.0, 4, 2), (0.5, 3, 1)], config, policy)
    first, second = policy.seen[:2]
    assert first.waiting_prompt_tokens.tolist() == [4, 4]
    assert (first.dispatched, second.dispatched) == (0, 2)
    assert second.instance.tolist() == [0, 0] and second.queued.tolist() == [1]
    assert second.prompt_tokens.tolist() == [4, 4]
    assert second.generated_tokens.tolist() == [2, 2]  # one token each, held in two
    assert second.kv_load.tolist() == [12] and second.kv_capacity.tolist() == [10]
    assert second.forecast is not None and second.forecast.mean().tolist() == [2, 1]
    assert second.waiting_forecast is not None and second.waiting_forecast.mean().tolist() == [1]
    assert second.waiting_generated_tokens.tolist() == [0]


@pytest.mark.parametrize(("clock", "steps"), [("barrier", 5), ("independent", 3 + 5)])
def test_instant_dispatch_counts_queued_requests(clock: str, steps: int) -> None:
    # JSQ-Load with one slot each. At 0: 0 -> instance 0 (tie), 1 -> instance 1 (0 < 5).
    # At 0.5 loads are 5, 3: 2 -> instance 1; then 5, 4: 3 -> instance 1 again.
    # 0 runs 0-3; on instance 1: request 1 runs 0-3, 2 runs 3-4, 3 runs 4-5.
    config = ReferenceConfig(2, 1, clock=clock, dispatch="instant")  # type: ignore[arg-type]
    requests = [(0.0, 5, 3), (0.0, 3, 3), (0.5, 1, 1), (0.5, 9, 1)]
    result = reference_run(config, requests, create_policy("jsq_load"))
    assert column(result, "instance") == [0, 1, 1, 1]
    assert column(result, "placed") == [0.0, 0.0, 0.5, 0.5]
    assert column(result, "start") == [0.0, 0.0, 3.0, 4.0]
    assert column(result, "end") == [3.0, 3.0, 4.0, 5.0]
    assert len(result.steps) == steps


def test_memory_runs_out_and_the_last_admitted_is_recomputed() -> None:
    # t = 1 + new, capacity 10.
    #   0  loads 8,  new 2: 3 s, contexts 5, 5
    #   3  loads 10, new 2: 3 s, contexts 6, 6 > 10: request 1 is preempted with n = 2
    #   6  loads 6,  new 1: 2 s       (6 + 6 does not fit)
    #   8  loads 7,  new 1: 2 s, request 0 ends
    #  10  loads 6,  new 6, all recomputed: 7 s, request 1 ends
    config = ReferenceConfig(1, 2, capacity=10, b=1.0)
    result = alone([(None, 4, 4), (None, 4, 3)], config)
    assert loads(result) == [[8], [10], [6], [7], [6]]
    assert [step.time for step in result.steps] == [0.0, 3.0, 6.0, 8.0, 10.0]
    assert column(result, "end") == [10.0, 17.0]
    assert column(result, "start") == [0.0, 0.0]
    assert column(result, "first_token") == [3.0, 3.0]
    assert column(result, "preemptions") == [0, 1]
    assert (result.preemptions, result.tokens) == (1, 7)


def test_preempted_requests_keep_their_order() -> None:
    # Four requests of 2 tokens, three tokens to give, that gain 5 a step; capacity 17.
    #   0  8:  after it 4 · 7 = 28: 3, then 2 are preempted
    #   1  14: after it 2 · 12 = 24: 1 is preempted; queue 1, 2, 3
    #   2  12: request 0 ends; 1 (12) comes back, 2 (7) does not fit beside it
    #   3  12: request 1 ends; 2 and 3 come back
    #   4  14: after it 12 + 12: 3 is preempted again
    #   5  12: request 2 ends    6  12: request 3 ends
    config = ReferenceConfig(1, 4, capacity=17, drift=(5,))
    result = alone([(None, 2, 3)] * 4, config)
    assert loads(result) == [[8], [14], [12], [12], [14], [12], [12]]
    assert column(result, "end") == [3.0, 4.0, 6.0, 7.0]
    assert column(result, "preemptions") == [0, 1, 1, 2]
    assert column(result, "first_token") == [1.0] * 4


@pytest.mark.parametrize(
    ("batching", "start", "end"),
    [
        # Requests 1 (3 tokens), 2 (8) and 3 (5) queue at 0.5; request 0 leaves 9 of 14 at 1.
        # fcfs: 1 at 1; 2 waits for 0 to end at 3, is preempted at 4 (6 + 9) and comes back at 6
        # with 3 beside it.
        ("fcfs", [0, 1, 3, 6], [3, 6, 7, 7]),
        # bin packing: 2 at 1, preempted at 2 (6 + 9 > 14). Though 1 and 3 fit, it goes first: at
        # 3, with 5 left for 3, the larger one. Request 1 runs 4-9.
        ("bin_packing", [0, 4, 1, 3], [3, 9, 4, 4]),
        # least work left: 3 at 1; 2 is next and does not fit (4 left) until 2; 1 at 3.
        ("least_work_left", [0, 3, 2, 1], [3, 8, 4, 2]),
    ],
)
def test_batching_orders(batching: str, start: list[float], end: list[float]) -> None:
    config = ReferenceConfig(1, 3, capacity=14, dispatch="instant", batching=batching)  # type: ignore[arg-type]
    result = alone([(0.0, 4, 3), (0.5, 3, 5), (0.5, 8, 2), (0.5, 5, 1)], config)
    assert column(result, "start") == start
    assert column(result, "end") == end


def test_chunked_prefill_shares_the_budget() -> None:
    # t = 1 + new, four tokens a step.
    #   0  4 of request 0's 6; none left to admit 1           5 s
    #   5  2 of 0, which decodes from here on; 2 of 1's 3     5 s, 0 gives its first token
    #  10  0 decodes, 1 of 1, which decodes from here on      3 s, both end
    config = ReferenceConfig(1, 3, prefill="chunked", max_batched_tokens=4, b=1.0)
    result = alone([(None, 6, 2), (None, 3, 1)], config)
    assert loads(result) == [[6], [9], [10]]
    assert [step.seconds for step in result.steps] == [5.0, 5.0, 3.0]
    assert [step.running for step in result.steps] == [[1], [2], [2]]
    assert column(result, "start") == [0.0, 5.0]
    assert column(result, "first_token") == [10.0, 13.0]
    assert column(result, "end") == [13.0, 13.0]


def test_a_request_preempted_while_it_is_filled_begins_again() -> None:
    # Capacity 12, four tokens a step. 0 (4 tokens) decodes from 0 on; 1 (7) is filled with 3 at 1;
    # at 2 they hold 6 + 7 > 12: 1 has to wait for 0 to end at 4, takes 4 and 3, and ends at 6.
    config = ReferenceConfig(1, 3, capacity=12, prefill="chunked", max_batched_tokens=4)
    result = alone([(None, 4, 4), (None, 7, 1)], config)
    assert loads(result) == [[4], [12], [6], [7], [7], [7]]
    assert column(result, "start") == [0.0, 1.0]
    assert column(result, "end") == [4.0, 6.0]
    assert column(result, "preemptions") == [0, 1]


def test_a_prefill_stage_gives_the_first_token() -> None:
    # t = 1 + new. Two servers: 0 from 0 to 3, 1 from 0.5 to 4.5 (its only token), 2 on the server
    # free first, from 3 to 5. Decoding: 0 at 3 (2 s); at 5 with 2 (3 s).
    requests = [(0.0, 2, 3), (0.5, 3, 1), (1.0, 1, 2)]
    config = ReferenceConfig(1, 2, prefill="stage", n_prefill=2, b=1.0)
    result = alone(requests, config)
    assert column(result, "arrival") == [0.0, 0.5, 1.0]
    assert column(result, "first_token") == [3.0, 4.5, 5.0]
    assert column(result, "instance") == [0, -1, 0]
    assert repr(column(result, "placed")) == repr([3.0, math.nan, 5.0])
    assert repr(column(result, "start")) == repr([3.0, math.nan, 5.0])
    assert column(result, "end") == [8.0, 4.5, 8.0]
    assert loads(result) == [[3], [4 + 2]]
    assert result.tokens == 6
    # One server: 0 to 3, 3 to 7, 7 to 9.
    one = alone(requests, replace(config, n_prefill=1))
    assert column(one, "first_token") == [3.0, 7.0, 9.0]


@pytest.mark.parametrize(
    ("drift", "expected"), [((0,), [4, 4, 4]), ((2,), [4, 6, 8]), ((1, 3), [4, 5, 8])]
)
def test_drift_is_what_a_request_gains_a_step(drift: tuple[int, ...], expected: list[int]) -> None:
    result = alone([(None, 4, 3)], ReferenceConfig(1, 1, drift=drift))
    assert loads(result) == [[load] for load in expected]


def test_in_a_barrier_an_idle_instances_steps_count() -> None:
    # JSQ-Load: 0 on instance 0; 1, at 1.0, on instance 1, whose first step it is: with a barrier
    # it is the cluster's second one, which gives 3.
    requests, policy = [(0.0, 4, 3), (1.0, 1, 2)], create_policy("jsq_load")
    barrier = reference_run(ReferenceConfig(2, 1, drift=(1, 3)), requests, policy)
    assert loads(barrier) == [[4, 0], [5, 1], [8, 4]]
    config = ReferenceConfig(2, 1, clock="independent", drift=(1, 3))
    own = reference_run(config, requests, policy)
    assert [step.loads for step in own.steps if step.time == 2.0] == [[8, 2]] * 2
