"""The compiled fleet: examples worked by hand, and what holds whatever starts and drains."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescheduler.scaling.capacity import operating_point, past_lengths, sustained_rate
from rescheduler.scaling.fleet import (
    ARRIVED,
    CUT,
    DRAIN_SECONDS,
    DRAINING,
    HEAD,
    MOVED,
    PAID_SECONDS,
    PREEMPTED,
    READY,
    RETURNED,
    STARTING,
    STOPPED,
    Fleet,
    Machine,
    advance,
    drain,
    empty_fleet,
    expected_load,
    observed_load,
    start,
    waiting_load,
)
from rescheduler.scaling.lengths import length_forecast
from rescheduler.step_time.step_time import batch_step_time


def machine_like(
    slots: int = 4,
    capacity: float = 100.0,
    batched_tokens: int = 100,
    per_new: float = 0.0,
    moves: bool = True,
    move_seconds: float = 0.0,
) -> Machine:
    """A replica whose steps take 0.1 s, and ``per_new`` for each token computed."""
    step_time = batch_step_time(0.1, per_new, 0.0)
    return Machine(step_time, slots, capacity, batched_tokens, move_seconds, 0.0, 1.0, moves)


def fleet_of(
    machine: Machine, requests: list[tuple[float, int, int]], replicas: int = 4, ready: int = 1
) -> Fleet:
    arrival, prompt, output = (
        np.array(column, dtype=float) for column in zip(*requests, strict=True)
    )
    fleet = empty_fleet(arrival, prompt, output, machine, replicas)
    fleet.state[:ready] = READY
    return fleet


def test_a_prompt_and_its_tokens_take_their_steps() -> None:
    machine = machine_like(batched_tokens=10)
    fleet = fleet_of(machine, [(0.4, 5, 21)])
    advance(fleet, machine, 2.0)
    assert fleet.first[0] == pytest.approx(0.05)  # half of the 10 tokens of a step of 0.1 s
    assert fleet.generated[0, 0] == pytest.approx(1 + 9.5 + 10)
    advance(fleet, machine, 3.0)
    assert fleet.end[0] == pytest.approx(0.05 + 20 * 0.1)
    assert fleet.occupied[0] == 0 and fleet.held[0] == 0


def test_prompts_take_time_from_those_that_decode() -> None:
    machine = machine_like(batched_tokens=101, per_new=0.01, capacity=1000)
    fleet = fleet_of(machine, [(0.0, 1, 900), (1.0, 50, 900)])
    advance(fleet, machine, 1.0)
    before = fleet.generated[0, 0]
    advance(fleet, machine, 2.0)
    # A step of one token takes 0.11 s; 50 tokens of a prompt take half a second.
    assert fleet.generated[0, 0] - before == pytest.approx((1 - 50 * 0.01) / 0.11)


def test_steps_full_of_prompts_are_what_a_long_queue_leaves() -> None:
    machine = machine_like(batched_tokens=101, per_new=0.01, capacity=10_000)
    fleet = fleet_of(machine, [(0.0, 1, 900), (1.0, 5000, 900)])
    advance(fleet, machine, 1.0)
    before = fleet.generated[0, 0]
    advance(fleet, machine, 2.0)
    assert fleet.generated[0, 0] - before == pytest.approx(1 / 1.11)
    assert fleet.unread[0, 1] == pytest.approx(5000 - 100 / 1.11)


def test_requests_go_where_the_least_is_held_and_wait_for_room_in_order() -> None:
    machine = machine_like(slots=1)
    fleet = fleet_of(machine, [(0, 30, 70), (0, 20, 70), (0, 10, 70)], ready=2)
    advance(fleet, machine, 1.0)
    assert fleet.request[:2, 0].tolist() == [0, 1]
    assert waiting_load(fleet) == (1.0, 10.0)
    assert observed_load(fleet)[:2] == (2.0, 1.0)


def test_the_last_admitted_is_preempted_where_the_cache_is_full_and_computed_again() -> None:
    machine = machine_like(capacity=40)
    fleet = fleet_of(machine, [(0, 5, 34), (0, 5, 34)])
    advance(fleet, machine, 2.0)
    assert fleet.counts[PREEMPTED] == 1 and fleet.counts[RETURNED] == 1
    generated = fleet.returned_generated[0]
    assert waiting_load(fleet) == (1.0, 5 + generated)
    advance(fleet, machine, 20.0)
    assert fleet.end[0] < fleet.end[1] < 20 and fleet.counts[RETURNED] == 0


def test_a_replica_is_ready_once_it_has_started_and_paid_for_from_the_beginning() -> None:
    machine = machine_like()
    fleet = fleet_of(machine, [(0, 5, 50)], ready=0)
    assert start(fleet, 3.0)
    advance(fleet, machine, 3.0)
    assert fleet.state[0] == STARTING and fleet.occupied[0] == 0
    advance(fleet, machine, 4.0)
    assert fleet.state[0] == READY and fleet.occupied[0] == 1
    assert fleet.clock[PAID_SECONDS] == 4.0
    full = [start(fleet, 3.0) for _ in range(4)]
    assert full == [True, True, True, False]


def test_a_replica_that_starts_stops_at_once() -> None:
    machine = machine_like()
    fleet = fleet_of(machine, [(0, 5, 50)])
    start(fleet, 30.0)
    drain(fleet, 1, 60.0)
    assert fleet.state.tolist() == [READY, STOPPED, STOPPED, STOPPED]


@pytest.mark.parametrize("moves", [True, False])
def test_what_a_drained_replica_still_runs_moves_or_is_cut(moves: bool) -> None:
    machine = machine_like(moves=moves, move_seconds=0.5)
    fleet = fleet_of(machine, [(0, 5, 90), (0, 5, 11), (3, 5, 90)])
    advance(fleet, machine, 1.0)
    drain(fleet, 0, 2.0)
    start(fleet, 0.0)
    advance(fleet, machine, 3.0)
    assert fleet.end[1] < 2 and fleet.state[0] == STOPPED
    assert fleet.counts[[MOVED, CUT]].tolist() == ([1, 0] if moves else [0, 1])
    assert fleet.clock[DRAIN_SECONDS] == 2.0
    before = fleet.generated[1, 0]
    advance(fleet, machine, 20.0)
    if moves:  # it stands still for half a second, and goes on
        assert fleet.end[0] == pytest.approx(3 + 0.5 + (90 - before) * 0.1, abs=1e-6)
    else:
        assert np.isnan(fleet.end[0])
    assert fleet.end[2] > 0


def test_what_is_expected_of_a_replica_is_what_its_requests_will_be() -> None:
    machine = machine_like(slots=8, capacity=1000)
    fleet = fleet_of(machine, [(0, 5, 60), (0, 5, 25)])
    advance(fleet, machine, 1.0)
    exact = length_forecast("exact", np.array([60, 25]), fleet.output, 0)
    generated = fleet.generated[0, :2]
    requests, variance, tokens = expected_load(fleet, exact, 0, 0, 20.0)
    assert (requests, variance) == (1.0, 0.0)
    assert tokens == pytest.approx(5 + generated[0] + 20)
    by_age = length_forecast("age", np.array([25, 60]), fleet.output, 0)
    requests, variance, _ = expected_load(fleet, by_age, 0, 3, 20.0)
    assert (requests, variance) == (pytest.approx(1.0), pytest.approx(0.5))  # each one by half


def test_an_operating_point_is_where_a_replica_settles() -> None:
    machine = machine_like(slots=16, capacity=1e6, batched_tokens=1000, per_new=0.002)
    prompt, output = np.full(100, 40), np.full(100, 100)
    point = operating_point(machine, past_lengths(prompt, output), 0.5)
    arrivals = np.arange(4000) / point.rate
    fleet = fleet_of(machine, [(time, 40, 100) for time in arrivals])
    advance(fleet, machine, 400.0)
    late = ~np.isnan(fleet.end) & (fleet.arrival > 200)
    finished = np.count_nonzero((fleet.end > 200) & (fleet.end <= 400)) / 200
    assert finished == pytest.approx(point.rate, rel=0.05)
    tpot = (fleet.end[late] - fleet.first[late]) / 99
    assert tpot.mean() == pytest.approx(point.step, rel=0.1)
    assert point.requests == 8
    lengths = past_lengths(prompt, output)
    assert sustained_rate(machine, lengths, point.step) >= point.rate * 0.98
    assert sustained_rate(machine, lengths, 0.05) == 0


@st.composite
def histories(draw: st.DrawFn) -> tuple[Machine, Fleet, list[tuple[str, int]]]:
    moves = draw(st.booleans())
    machine = machine_like(
        slots=draw(st.integers(1, 5)), capacity=60.0, per_new=draw(st.sampled_from([0, 0.01])),
        batched_tokens=20, moves=moves, move_seconds=draw(st.sampled_from([0.0, 1.5])),
    )  # fmt: skip
    lengths = st.tuples(st.floats(0, 30), st.integers(1, 30), st.integers(1, 30))
    requests = sorted(draw(st.lists(lengths, min_size=1, max_size=25)))
    actions = st.tuples(st.sampled_from(["start", "drain", "none"]), st.integers(0, 3))
    return machine, fleet_of(machine, requests), draw(st.lists(actions, min_size=40, max_size=60))


@given(histories())
def test_nothing_is_lost_and_nothing_overflows(
    history: tuple[Machine, Fleet, list[tuple[str, int]]],
) -> None:
    machine, fleet, actions = history
    paid = drained = 0.0
    for second, (action, m) in enumerate(actions):
        if action == "start":
            start(fleet, float(m))
        elif action == "drain" and fleet.state[m] in (STARTING, READY):
            drain(fleet, m, 3.0)
        paid += np.count_nonzero(fleet.state != STOPPED)
        drained += np.count_nonzero(fleet.state == DRAINING)
        draining = [requests_on(fleet, g) for g in np.flatnonzero(fleet.state == DRAINING)]
        places = np.flatnonzero(fleet.state == DRAINING)
        advance(fleet, machine, second + 1.0)
        assert fleet.clock[PAID_SECONDS] == paid and fleet.clock[DRAIN_SECONDS] == drained
        for g, before in zip(places, draining, strict=True):
            assert requests_on(fleet, g) <= before, "a draining replica gets nothing new"
        check(fleet, machine)
    if machine.moves:
        fleet.state[0] = READY
        advance(fleet, machine, len(actions) + 500.0)
        assert not np.isnan(fleet.end).any()
        assert (fleet.arrival <= fleet.first).all() and (fleet.first <= fleet.end + 1e-9).all()


def requests_on(fleet: Fleet, m: int) -> set[int]:
    return set(fleet.request[m, : fleet.occupied[m]].tolist())


def check(fleet: Fleet, machine: Machine) -> None:
    counts = fleet.counts
    on_replicas = [i for m in range(len(fleet.state)) for i in requests_on(fleet, m)]
    returned = fleet.returned[: counts[RETURNED]].tolist()
    ended = np.flatnonzero(~np.isnan(fleet.end)).tolist()
    waiting = list(range(counts[HEAD], len(fleet.arrival)))
    everywhere = on_replicas + returned + ended + waiting
    assert len(set(everywhere)) == len(everywhere) == len(fleet.arrival) - counts[CUT]
    assert counts[HEAD] <= counts[ARRIVED]
    for m in range(len(fleet.state)):
        n = fleet.occupied[m]
        held = (fleet.prompt[fleet.request[m, :n]] + fleet.generated[m, :n]).sum()
        assert fleet.held[m] == pytest.approx(held, abs=1e-6)
        assert held <= machine.capacity + 1e-6 and n <= machine.slots
        assert n == 0 or fleet.state[m] in (READY, DRAINING)
