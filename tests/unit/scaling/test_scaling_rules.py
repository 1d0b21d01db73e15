"""Rules for the number of replicas, and Kubernetes' semantics, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescheduler.scaling.capacity import Lengths, past_lengths
from rescheduler.scaling.rules import RULES, Ahead, Autoscaler, Seen

LENGTHS = past_lengths(np.array([10, 10]), np.array([20, 20]))


def seen(
    rates: tuple[float, ...] = (2.0,) * 4,
    running: float = 6,
    waiting: float = 2,
    held: float = 150,
    unplaced: tuple[float, float] = (2, 20),
    left: tuple[float, float, float] = (1, 0, 30),
    lengths: Lengths = LENGTHS,
) -> Seen:
    """Replicas of 10 requests and 1,000 tokens, whose steps take 0.5 s, and start in 60 s."""
    ahead = Ahead(*left, horizon=60.0, rates=np.array(rates), since=0.0)
    return Seen(running, waiting, held, unplaced, 2.0, 0.5, 10, 1000.0, lengths, lambda: ahead)


@pytest.mark.parametrize(
    ("rule", "demand"),
    [
        ("queue", 2 / 10),
        ("kv_usage", 150 / 1000),
        ("running", 6 / 10),
        ("load", 8 / 10),
        ("rate", 2 * 20 * 0.5 / 10),  # 2 requests a second stay for 10 s: 20 of them
        ("arrivals", 2 * 20 * 0.5 / 10),
        ("load_ahead", 1 / 10),
        ("load+arrivals", 2.0),
        # 1 is left; 2 a second for the 10 s that one stays make 20 more, and 1.28 √20 = 5.7.
        ("load_ahead+arrivals", (1 + 20 + 1.2816 * 20**0.5) / 10),
    ],
)
def test_a_rule_demands_what_it_says(rule: str, demand: float) -> None:
    assert RULES[rule].demand(seen()) == pytest.approx(demand, rel=0.03)


def test_load_is_the_fuller_of_requests_and_tokens() -> None:
    assert seen(held=900).present == pytest.approx((900 + 20) / 1000)
    assert seen(held=0).present == pytest.approx(8 / 10)


def test_arrivals_are_those_of_the_busiest_minute_until_a_replica_would_be_ready() -> None:
    assert RULES["arrivals"].demand(seen(rates=(3, 5, 9))) == pytest.approx(3.0, rel=0.01)
    later = seen()._replace(
        ahead=lambda: Ahead(0, 0, 0, horizon=60.0, rates=np.array([3.0, 5.0, 9.0]), since=30.0)
    )
    assert RULES["arrivals"].demand(later) == pytest.approx(5.0, rel=0.01)


@given(st.floats(0, 50), st.floats(0, 50), st.floats(0, 60))
def test_more_arrivals_never_demand_less(few: float, more: float, since: float) -> None:
    few, more = sorted((few, more))
    for name in ("arrivals", "load+arrivals", "load_ahead+arrivals"):
        demands = [RULES[name].demand(seen(rates=(rate,) * 4)) for rate in (few, more)]
        assert demands[0] <= demands[1]


def test_nothing_changes_within_the_tolerance() -> None:
    scaler = Autoscaler(target=0.5, stabilisation=0)
    assert scaler.desired(0, 2.15, 4) == 4  # 4.3 are wanted, less than 10% more
    assert scaler.desired(15, 2.3, 4) == 5  # 4.6
    assert scaler.desired(30, 1.85, 4) == 4  # 3.7, less than 10% less
    assert scaler.desired(45, 1.7, 4) == 4  # 3.4, rounded up
    assert scaler.desired(60, 1.5, 4) == 3


def test_replicas_are_added_at_once_and_stopped_once_demand_was_low_for_long() -> None:
    scaler = Autoscaler(target=1.0, stabilisation=300)
    current = scaler.desired(0, 6, 2)
    assert current == 6
    for now in range(15, 300, 15):
        current = scaler.desired(now, 2 if now < 150 else 3, current)
        assert current == 6, "six were recommended less than 300 s ago"
    assert scaler.desired(300, 2, 6) == 3, "three were, at most"
    assert scaler.desired(315, 8, 3) == 8


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.integers(1, 5), st.integers(5, 20))
def test_there_are_never_fewer_or_more_than_allowed(
    demands: list[float], least: int, most: int
) -> None:
    scaler = Autoscaler(0.7, least, most)
    current = least
    for k, demand in enumerate(demands):
        current = scaler.desired(15.0 * k, demand, current)
        assert least <= current <= most
