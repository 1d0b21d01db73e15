"""Fairness between accounts: what each gets of a line that several fill."""

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescheduler.ordering.fairness import interleave, slack

LINES = st.lists(st.tuples(st.integers(0, 4), st.floats(1.0, 1000.0)), max_size=60)


def shared_out(
    accounts: list[int], service: list[float], ahead: float, served: list[float]
) -> list[int]:
    n = len(accounts)
    order = np.arange(n)
    interleave(
        order,
        np.array(accounts, dtype=np.int64),
        np.array(served),
        np.array(service, dtype=np.float64),
        ahead,
        np.zeros(n, dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        np.zeros(len(served), dtype=np.int64),
        n,
    )
    return order.tolist()


@given(LINES, st.floats(0.0, 5000.0), st.lists(st.floats(0.0, 2000.0), min_size=5, max_size=5))
def test_no_account_that_waits_falls_behind_by_more_than_the_slack_and_a_request(
    line: list[tuple[int, float]], ahead: float, served: list[float]
) -> None:
    accounts, service = [account for account, _ in line], [tokens for _, tokens in line]
    order = shared_out(accounts, service, ahead, served)
    assert sorted(order) == list(range(len(line)))
    left = {account: accounts.count(account) for account in accounts}
    had = list(served)
    for i in order:
        least = min(had[account] for account, count in left.items() if count)
        assert had[accounts[i]] <= least + ahead, "who is further ahead waits"
        had[accounts[i]] += service[i]
        left[accounts[i]] -= 1
    for account in set(accounts):
        of_it = [i for i in order if accounts[i] == account]
        assert of_it == sorted(of_it), "an account's own requests keep their order"


@given(LINES)
def test_one_account_alone_is_served_in_the_order_of_service(
    line: list[tuple[int, float]],
) -> None:
    service = [tokens for _, tokens in line]
    assert shared_out([0] * len(line), service, 0.0, [7.0]) == list(range(len(line)))


def test_a_flood_takes_every_second_place_from_one_that_asks_as_much() -> None:
    order = shared_out([0] * 8 + [1] * 4, [10.0] * 12, 0.0, [0.0, 0.0])
    assert [int(i >= 8) for i in order] == [0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0]


def test_twice_the_weight_is_twice_the_places() -> None:
    order = shared_out([0] * 6 + [1] * 6, [10.0] * 6 + [5.0] * 6, 0.0, [0.0, 0.0])
    assert [int(i >= 6) for i in order[:6]].count(1) == 4


@pytest.mark.parametrize(("fairness", "ahead"), [(0.0, inf), (1.0, 0.0), (0.5, 30.0)])
def test_half_fair_is_a_request_ahead(fairness: float, ahead: float) -> None:
    assert slack(fairness, 30.0) == ahead
