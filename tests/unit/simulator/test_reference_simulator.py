"""The reference simulator against a run of each kind that is worked out by hand.

What else it does is plain in its code, and the engine is held against it on drawn clusters.

Unless a test says otherwise a step takes one second, so that times can be counted.
"""

import math
from dataclasses import replace

import pytest
from reference_simulator import (
    ReferenceConfig,
    ReferenceResult,
    reference_run,
)

from rescheduler.routing.policy import create_policy


def loads(result: ReferenceResult) -> list[list[int]]:
    return [step.loads for step in result.steps]


def column(result: ReferenceResult, name: str) -> list[float]:
    return [getattr(request, name) for request in result.requests]


def served(
    requests: list[tuple[float | None, int, int]], config: ReferenceConfig
) -> ReferenceResult:
    return reference_run(config, requests, create_policy("fcfs"))


def test_a_barrier_step_takes_the_slowest_instance_plus_the_mean_load() -> None:
    # t = 1 + new/2 + L/4, and L's mean/2; one slot each, so request 2 waits.
    #  0.0  loads 4, 8: t = 2.5, 3.5; mean 6:   3.5 + 3.0  = 6.5    (request 1 ends)
    #  6.5  loads 5, 2: t = 2.75, 2;  mean 3.5: 2.75 + 1.75 = 4.5   (0 and 2 end)
    config = ReferenceConfig(2, 1, pool_limit=3, a=1, b=0.5, c=0.25, mean_context=0.5)
    result = reference_run(
        config, [(None, 4, 2), (None, 8, 1), (None, 2, 1)], create_policy("fcfs")
    )
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
    result = served([(None, 4, 4), (None, 4, 3)], config)
    assert loads(result) == [[8], [10], [6], [7], [6]]
    assert [step.time for step in result.steps] == [0.0, 3.0, 6.0, 8.0, 10.0]
    assert column(result, "end") == [10.0, 17.0]
    assert column(result, "start") == [0.0, 0.0]
    assert column(result, "first_token") == [3.0, 3.0]
    assert column(result, "preemptions") == [0, 1]
    assert (result.preemptions, result.tokens) == (1, 7)


def test_chunked_prefill_shares_the_budget() -> None:
    # t = 1 + new, four tokens a step.
    #   0  4 of request 0's 6; none left to admit 1           5 s
    #   5  2 of 0, which decodes from here on; 2 of 1's 3     5 s, 0 gives its first token
    #  10  0 decodes, 1 of 1, which decodes from here on      3 s, both end
    config = ReferenceConfig(1, 3, prefill="chunked", max_batched_tokens=4, b=1.0)
    result = served([(None, 6, 2), (None, 3, 1)], config)
    assert loads(result) == [[6], [9], [10]]
    assert [step.seconds for step in result.steps] == [5.0, 5.0, 3.0]
    assert [step.running for step in result.steps] == [[1], [2], [2]]
    assert column(result, "start") == [0.0, 5.0]
    assert column(result, "first_token") == [10.0, 13.0]
    assert column(result, "end") == [13.0, 13.0]


def test_a_prefill_stage_gives_the_first_token() -> None:
    # t = 1 + new. Two servers: 0 from 0 to 3, 1 from 0.5 to 4.5 (its only token), 2 on the server
    # free first, from 3 to 5. Decoding: 0 at 3 (2 s); at 5 with 2 (3 s).
    requests = [(0.0, 2, 3), (0.5, 3, 1), (1.0, 1, 2)]
    config = ReferenceConfig(1, 2, prefill="stage", n_prefill=2, b=1.0)
    result = served(requests, config)
    assert column(result, "arrival") == [0.0, 0.5, 1.0]
    assert column(result, "first_token") == [3.0, 4.5, 5.0]
    assert column(result, "instance") == [0, -1, 0]
    assert repr(column(result, "placed")) == repr([3.0, math.nan, 5.0])
    assert repr(column(result, "start")) == repr([3.0, math.nan, 5.0])
    assert column(result, "end") == [8.0, 4.5, 8.0]
    assert loads(result) == [[3], [4 + 2]]
    assert result.tokens == 6
    # One server: 0 to 3, 3 to 7, 7 to 9.
    one = served(requests, replace(config, n_prefill=1))
    assert column(one, "first_token") == [3.0, 7.0, 9.0]


def test_in_a_barrier_an_idle_instances_steps_count() -> None:
    # JSQ-Load: 0 on instance 0; 1, at 1.0, on instance 1, whose first step it is: with a barrier
    # it is the cluster's second one, which gives 3.
    requests, policy = [(0.0, 4, 3), (1.0, 1, 2)], create_policy("jsq_load")
    barrier = reference_run(ReferenceConfig(2, 1, drift=(1, 3)), requests, policy)
    assert loads(barrier) == [[4, 0], [5, 1], [8, 4]]
    config = ReferenceConfig(2, 1, clock="independent", drift=(1, 3))
    own = reference_run(config, requests, policy)
    assert [step.loads for step in own.steps if step.time == 2.0] == [[8, 2]] * 2


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
    result = served([(0.0, 4, 3), (0.5, 3, 5), (0.5, 8, 2), (0.5, 5, 1)], config)
    assert column(result, "start") == start
    assert column(result, "end") == end
