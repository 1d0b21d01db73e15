"""Each routing policy on a case worked out by hand, and its ties."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_views import cluster, placed

from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.routing import BRH, FastPhi, Overflow
from rescheduler.routing.balance_route import (
    brh_scores,
    discounts,
    envelope,
    overflow_costs,
    trapezoid_weights,
)
from rescheduler.routing.inputs import empty_target


def test_fcfs_fills_workers_in_increasing_index() -> None:
    view = cluster([[(9, 1)], [], []], [(5, 1)] * 6, slots=[2, 0, 3])
    assert placed("fcfs", view) == [0, 2, 2, 2, -1, -1]


def test_fcfs_lets_no_request_overtake_one_that_fits_nowhere() -> None:
    view = cluster([[(60, 1)], [(30, 1)]], [(40, 1), (50, 1), (10, 1)], slots=4, capacity=100)
    assert placed("fcfs", view) == [0, 1, 1]
    blocked = cluster([[(60, 1)], [(30, 1)]], [(40, 1), (71, 1), (10, 1)], slots=4, capacity=100)
    assert placed("fcfs", blocked) == [0, -1, -1]


def test_fcfs_reads_a_free_place_from_the_queues_when_instances_queue() -> None:
    busy = [[(10, 9)] * 3, [(10, 9)] * 2, [(10, 9)] * 2]
    for queued, expected in (([0, 0, 0], 0), ([1, 0, 0], 1), ([2, 1, 1], 1), ([2, 2, 2], 0)):
        view = cluster(busy, [(5, 1)], instant=True, queued=queued)
        assert placed("fcfs", view) == [expected]
    full = cluster([[(90, 9)], [(10, 9)]], [(20, 1)], capacity=100, instant=True)
    assert placed("fcfs", full) == [1]


def test_round_robin_goes_on_where_it_stopped_and_skips_what_is_full() -> None:
    view = cluster([[], [], []], [(5, 1)] * 4, slots=[2, 1, 2], dispatched=7)
    assert placed("round_robin", view) == [1, 2, 0, 2]  # turns 1, 2, 0, 1: that one is full


def test_jsq_counts_requests_and_jsq_load_tokens() -> None:
    view = cluster([[(900, 5)], [(10, 5)] * 2], [(5, 1), (5, 1)])
    assert placed("jsq", view) == [0, 0]  # 1 and 2 requests; then 2 and 2: the lowest index
    assert placed("jsq_load", view) == [1, 1]  # 900 and 20 tokens


def test_vllm_adds_kv_pressure_to_waiting_requests() -> None:
    # 0: 2 started, 1 queued, KV 90% full: 3 + 6 * 1 * 0.4 = 5.4; 1: 5 started: 5
    view = cluster([[(300, 5)] * 3, [(20, 5)] * 5], [(5, 1)], capacity=1000, queued=[1, 0])
    assert placed("vllm", view) == [1]
    assert placed("vllm", view, version="0.20") == [1]  # 4 + 2 = 6 against 5
    # KV 45% full: 3 + 0 against 5; version 0.20 does not look: 6 against 5
    roomy = cluster([[(150, 5)] * 3, [(20, 5)] * 5], [(5, 1)], capacity=1000, queued=[1, 0])
    assert placed("vllm", roomy) == [0]
    assert placed("vllm", roomy, version="0.20") == [1]


def test_vllm_breaks_ties_in_turn_and_counts_what_it_has_routed() -> None:
    idle = cluster([[], [], []], [(5, 1)], dispatched=4)
    assert placed("vllm", idle) == [1]
    assert placed("vllm", idle, version="0.20") == [0]
    # Placed ones count 4 each as waiting: 0 then 4 against 3 running
    view = cluster([[], [(10, 5)] * 3], [(5, 1)] * 3)
    assert placed("vllm", view, version="0.20") == [0, 1, 0]


def test_min_min_places_short_requests_first() -> None:
    view = cluster([[(9, 10)], [(9, 15)]], [(5, 30), (5, 4), (5, 8)])
    # 4 -> 0 (14), 8 -> 0 (22), 30 -> 1 (45)
    assert placed("min_min", view) == [1, 0, 0]


def test_min_min_compares_completions_where_each_request_fits() -> None:
    # The large request fits only on 1, where 3 tokens end at 43; the small one ends at 20 + 9.
    view = cluster([[(80, 20)], [(10, 40)]], [(50, 3), (5, 9)], slots=[2, 2], capacity=100)
    assert placed("min_min", view) == [1, 0]
    assert placed("min_min", cluster([[(80, 20)]], [(50, 3), (5, 9)], capacity=100)) == [-1, 0]


def test_max_capacity_takes_most_free_tokens_for_the_front_only() -> None:
    view = cluster([[(10, 9)], [(150, 9)]], [(45, 1), (60, 1), (1, 1)], capacity=[100, 200])
    assert placed("max_capacity", view) == [0, -1, -1]  # 90 and 50 free; then 45 and 50
    unlimited = cluster([[(10, 9)], [(9, 9)]], [(5, 1), (5, 1)])
    assert placed("max_capacity", unlimited) == [1, 0]


def test_max_capacity_goes_by_load_while_a_capacity_is_unknown() -> None:
    view = cluster([[(50, 9)], [(20, 9)]], [(20, 1)] * 3, capacity=[100, UNLIMITED])
    assert placed("max_capacity", view) == [1, 1, 0], "not all to the unknown one"
    assert placed("max_capacity", view, reserve=0.05, starvation=1000) == [1, 1, 0]


def test_max_capacity_keeps_a_reserve_except_on_an_empty_instance() -> None:
    view = cluster([[(50, 1.0)], []], [(45, 1.0), (40, 1.0), (1, 1.0)], capacity=100)
    assert placed("max_capacity", view) == [1, 1, 0]
    # 10 stay free: the second has 55 left after the first, of which 45 may be taken.
    assert placed("max_capacity", view, reserve=0.1) == [1, 1, 0]
    assert placed("max_capacity", view, reserve=0.2) == [1, -1, -1]
    assert placed("max_capacity", view, reserve=0.2, starvation=1) == [1, -1, 1]
    over = replace(cluster([[(150, 1.0)]], [(5, 1.0)], capacity=100), instant=True)
    assert placed("max_capacity", over) == [0], "without a reserve nobody waits at the router"
    assert placed("max_capacity", over, reserve=0.1) == [-1]
    full = cluster([[(50, 1.0)], []], [(95, 1.0)], capacity=100)
    assert placed("max_capacity", full, reserve=0.2) == [1], "who would never fit waits for nobody"


def test_decode_balancer_balances_tokens_to_come() -> None:
    view = cluster([[(900, 5)], [(10, 20)]], [(5, 16), (5, 3), (5, 3)])
    assert placed("decode_balancer", view) == [0, 1, 0]  # 5|20, 21|20, 21|23


def test_dedicated_small_large_keeps_classes_apart() -> None:
    view = cluster([[], []], [(5, 300), (5, 10), (5, 11), (5, 299)])
    assert placed("dedicated_small_large", view, heavy_tokens=299) == [0, 1, 1, 0]
    four = cluster([[], [], [], []], [(5, 300), (5, 10), (5, 10), (5, 10)])
    assert placed("dedicated_small_large", four, heavy_tokens=299, share=0.25) == [0, 1, 2, 3]
    full = cluster([[(5, 9)], []], [(5, 300), (5, 10)], slots=1)
    assert placed("dedicated_small_large", full, heavy_tokens=299) == [-1, 1]
    assert placed("dedicated_small_large", cluster([[]], [(5, 300), (5, 10)])) == [0, 0]


def test_br0_prefers_what_does_not_overflow() -> None:
    # Loads 1000, 700, 400. Size 500: margins 0, 300, 600; F = -1000, -100, 500.
    view = cluster([[(1000, 9)], [(700, 9)], [(400, 9)]], [(500, 1)], slots=2)
    assert placed("br0", view) == [2]
    # With 2 full: F = -1000 and -100.
    assert placed("br0", cluster([[(1000, 9)], [(700, 9)], []], [(500, 1)], slots=[2, 2, 0])) == [1]


def test_br0_raises_the_envelope_as_it_places() -> None:
    # 600 goes to 1 (700 of 100 + 600), which is then the heaviest: 100 fits below it on 0.
    view = cluster([[(500, 9)], [(100, 9)]], [(600, 1), (100, 1)])
    assert placed("br0", view) == [1, 0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("br0", {}), ("brh", {}), ("overflow", {}), ("fast_phi", {}), ("fast_phi", {"k": 1})),
        *(("decode_balancer", {}), ("jsq_load", {})),
    ],
)
def test_scores_that_are_equal_go_to_the_lowest_load_then_index(
    name: str, options: dict[str, int]
) -> None:
    # A request of 10 tokens overflows nowhere but on the heaviest; without the rule it would
    # always go to the lowest index.
    heavy, view = [(9000, 900)], [[(50, 900)], [(20, 900)], [(20, 900)]]
    assert placed(name, cluster([heavy, *view], [(10, 5)]), **options) == [2]


def test_brh_makes_the_choice_of_the_papers_example() -> None:
    """The EP Barrier Tax, 'BR-H: Looking Ahead': penalties of about 5,463 and 3,780, B wins."""
    policy = BRH(alpha=0, beta=8, gamma=0.9, steps=[0, 5, 10, 50])
    gpu_a = [(1500, 10), (2200, 80), (1700, 5)]
    view = cluster([gpu_a, [(4000, 900)]], [(500, 60)])
    inputs = policy.inputs(view)
    assert inputs.ahead[0].tolist() == [5400, 3710, 2210, 2250]
    inputs.ahead[1] = [4000, 3900, 3800, 3500]  # given in the paper without its requests

    scores = np.empty(2)
    highest = envelope(inputs.ahead)
    assert highest.tolist() == [5400, 3900, 3800, 3500]
    weights = discounts(inputs.points, policy.gamma)
    brh_scores(inputs.ahead, policy.parameters(), weights, 500.0, highest, scores)
    assert -scores == pytest.approx([5463, 3780], rel=1e-3)  # the paper rounds the discounts

    target = empty_target(inputs)
    BRH.kernel(inputs, policy.parameters(), target)
    assert target.tolist() == [1]


@pytest.mark.parametrize("size", [100, 500, 1500])
def test_brh_without_a_horizon_is_br0(size: int) -> None:
    view = cluster([[(1000, 9)], [(700, 9)], [(400, 9)]], [(size, 5)] * 4, slots=3)
    assert placed("brh", view, horizon=0) == placed("br0", view)


def test_overflow_weights_the_steps_by_survival() -> None:
    # A ends soon, B goes on. One token short-lived: only now counts, where B has the margin;
    # long-lived: B overflows for most of the request's life.
    gpus = [[(5000, 3)], [(4000, 500)]]
    assert placed("overflow", cluster(gpus, [(500, 2)])) == [1]
    assert placed("overflow", cluster(gpus, [(500, 200)])) == [0]


@given(
    loads=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 30)), min_size=1, max_size=4),
    request=st.tuples(st.integers(1, 400), st.integers(1, 30)),
)
def test_the_overflow_cost_is_the_papers_sum(
    loads: list[tuple[int, int]], request: tuple[int, int]
) -> None:
    policy = Overflow(horizon=20)
    inputs = policy.inputs(cluster([[r] for r in loads], [request]))
    costs = np.empty(len(loads))
    overflow_costs(inputs, policy.parameters(), 0, envelope(inputs.ahead), costs)
    size, left = request
    for g, cost in enumerate(costs):
        expected = 0.0
        for h in range(min(left, 21)):
            load = [context + h if h < end else 0 for context, end in loads]
            expected += max(size + h - (max(load) - load[g]), 0)
        assert cost == pytest.approx(expected)


def test_fast_phi_takes_quantiles_of_the_output_length() -> None:
    fitted = FastPhi(k=5).with_lengths(np.arange(1, 101))
    assert fitted.points().tolist() == [0, 20, 40, 60, 80]
    assert fitted.with_lengths([10, 10, 10]).points().tolist() == [0, 10]
    assert FastPhi(k=1).with_lengths([3, 9]).points().tolist() == [0]
    assert FastPhi(steps=[0, 7]).with_lengths([3, 9]).points().tolist() == [0, 7]
    assert FastPhi().points().tolist() == [0, 64, 128, 256, 512]
    with pytest.raises(ValueError, match="output lengths"):
        FastPhi().with_lengths([])


def test_fast_phi_integrates_by_the_trapezoid_rule() -> None:
    assert trapezoid_weights([0, 20, 60]).tolist() == [10, 30, 20]
    assert trapezoid_weights([0]).tolist() == [1]
    points = np.array([0, 3, 10, 40])
    assert trapezoid_weights(points) @ points == pytest.approx(40**2 / 2)  # exact where linear


def test_fast_phi_of_one_point_knows_the_current_load_only() -> None:
    gpus = [[(5000, 3)], [(4000, 500)]]
    assert placed("fast_phi", cluster(gpus, [(500, 200)]), k=1) == [1]
    assert placed("fast_phi", cluster(gpus, [(500, 200)]), steps=[0, 50, 100, 150]) == [0]


def test_headroom_places_where_an_overflow_is_least_likely() -> None:
    # The first holds less now and much more later: 100 steps ahead 6 x 180, against 700.
    for left, expected in ((500, 1), (20, 0)):
        growing = [[(80, left)] * 6, [(600, left)]]
        assert placed("headroom", cluster(growing, [(50, left)], capacity=2000)) == [expected]
    without_limit = cluster([[(80, 9)], [(70, 9)]], [(50, 9)])
    assert placed("headroom", without_limit) == [1]  # no difference but the load
    unknown = cluster([[(300, 500)], [(600, 500)]], [(50, 500)], capacity=[5000, UNLIMITED])
    assert placed("headroom", unknown) == [0], "not all to the one whose capacity is unknown"


def test_headroom_lets_requests_wait_where_the_cache_would_overflow() -> None:
    # 500 + 149 and 300 + 149 tokens in the end.
    running, waiting = [[(500, 150)]], [(300, 150), (10, 5)]
    dear = {"prefill_cost": 0.5}
    assert placed("headroom", cluster(running, waiting, capacity=1150), **dear)[0] == 0
    full = cluster(running, waiting, capacity=1000)
    assert placed("headroom", full, **dear) == [-1, 0]
    # Others pass it for so many steps.
    for waited, starvation, expected in ((9, 10, 0), (10, 10, -1), (0, 0, -1)):
        view = replace(full, waited_steps=np.array([waited, 0]))
        assert placed("headroom", view, starvation=starvation, **dear) == [-1, expected]
    # The one that runs ends first, and with it more than half of the load.
    assert placed("headroom", cluster([[(500, 20)]], waiting, capacity=900), **dear)[0] == 0
    # An empty instance takes what may overflow alone: nobody would ever be placed otherwise.
    assert placed("headroom", cluster([[]], [(300, 900)], capacity=350), **dear) == [0]


def test_headroom_accepts_an_overflow_that_costs_less_than_is_gained_until_then() -> None:
    # 1,000 tokens are passed after 101 steps: two requests wait for a prefill of about 401.
    view = cluster([[(500, 150)]], [(300, 150)], capacity=1000)
    even = 102 / (2 * 401)
    for epsilon in (0.5, 1.0):  # steps looked at are some 20 apart there
        cheap, dear = 0.9 * epsilon * even, 1.3 * epsilon * even
        assert placed("headroom", view, epsilon=epsilon, prefill_cost=cheap) == [0]
        assert placed("headroom", view, epsilon=epsilon, prefill_cost=dear) == [-1]


def test_headroom_looks_no_further_than_half_of_the_load_lasts() -> None:
    # Two long requests overflow 1,300 tokens in the end; until the short ones end nothing does.
    def view(short: int) -> ClusterView:
        running = [(100, 700), *[(100, 40)] * short]
        return cluster([running], [(100, 700)], capacity=1300)

    dear = {"prefill_cost": 1.0}
    assert placed("headroom", view(0), **dear) == [-1]
    assert placed("headroom", view(1), **dear) == [-1]  # two thirds of the load outlast it
    assert placed("headroom", view(6), **dear) == [0]
