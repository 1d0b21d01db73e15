"""The order of service: its keys, and that no request starves."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rescheduler.ordering import ServiceOrder, create_order
from rescheduler.ordering.kernel import HOLDS_BACK, new_waiting, put_in_order, tail_rate

ORDERS = [
    create_order("shortest"),
    create_order("shortest", by="prompt", starvation=3.0),
    create_order("response_ratio"),
    create_order("boost"),
    create_order("boost", gamma=0.1, starvation=1.5),
]


@dataclass
class Line:
    """Requests in order of arrival."""

    waited: list[float]
    cost: list[float]
    alone: list[float]
    latest: list[float]

    def served(self, order: ServiceOrder, gamma: float = 0.05) -> tuple[list[int], bool]:
        n = len(self.waited)
        waiting = new_waiting(n + 3)
        for name in ("waited", "cost", "alone", "latest"):
            getattr(waiting, name)[:n] = getattr(self, name)
        alone = put_in_order(order.parameters(), gamma, waiting, n)
        return waiting.order[:n].tolist(), bool(alone)

    def due(self, order: ServiceOrder) -> list[float]:
        """Seconds of waiting after which each is overdue."""
        times = order.parameters().starvation
        return [min(times * e, t) for e, t in zip(self.alone, self.latest, strict=True)]


@st.composite
def lines(draw: st.DrawFn) -> Line:
    n = draw(st.integers(1, 40))
    seconds = st.floats(0.01, 500.0)
    waited = sorted((draw(seconds) for _ in range(n)), reverse=True)
    alone = [draw(seconds) for _ in range(n)]
    cost = [draw(st.sampled_from([0.1, 1.0, 2.0, 70.0])) for _ in range(n)]
    latest = [draw(st.one_of(st.just(math.inf), seconds)) for _ in range(n)]
    return Line(waited, cost, alone, latest)


@given(lines())
def test_without_forecasts_it_is_the_order_of_arrival(line: Line) -> None:
    assert line.served(create_order("fcfs")) == (list(range(len(line.waited))), False)


@given(lines(), st.sampled_from(ORDERS), st.sampled_from([0.0, 0.01, 1.0]))
def test_the_order_is_that_of_the_formulas(line: Line, order: ServiceOrder, gamma: float) -> None:
    n, due = len(line.waited), line.due(order)
    unit = sum(line.alone) / sum(line.cost)
    rate = order.parameters().gamma or gamma

    def key(i: int) -> tuple[int, float]:
        waited, cost, alone = line.waited[i], line.cost[i], line.alone[i]
        if waited >= due[i]:
            return 0, due[i] - waited
        if order.name == "shortest" or not rate > 0:
            return 1, -waited / alone if order.name == "response_ratio" else cost
        if order.name == "response_ratio":
            return 1, -waited / alone
        return 1, -waited + math.log(-math.expm1(-rate * unit * cost)) / rate

    found, alone = line.served(order, gamma)
    assert sorted(found) == list(range(n))
    keys = [key(i) for i in found]
    for (group, a), (later, b) in pairwise(keys):
        assert group < later or (group == later and a <= b + 1e-9 * max(1.0, abs(b)))
    first = found[0]
    assert alone == (line.waited[first] >= max(due[first], HOLDS_BACK * due[first]))


@settings(max_examples=20)
@given(st.sampled_from(ORDERS), st.integers(0, 10_000), st.integers(1, 3))
def test_one_that_is_long_is_served_however_many_short_ones_come(
    order: ServiceOrder, seed: int, each_second: int
) -> None:
    """One server, which is offered more than it can do, and a request that all others pass."""
    generator = np.random.default_rng(seed)
    long, now, waiting = (0.0, 5.0), 0.0, [(0.0, 5.0)]
    bound = order.parameters().starvation * long[1]
    backlog = 0
    while long in waiting:
        waiting += [(now, float(generator.uniform(0.5, 1.5))) for _ in range(each_second)]
        times = [now - arrived for arrived, _ in waiting]
        alone = [length for _, length in waiting]
        if now < bound:
            backlog = len(waiting)
        found, _ = Line(times, alone, alone, [math.inf] * len(waiting)).served(order)
        now += 1.0
        del waiting[found[0]]
        assert now <= bound + backlog + 1, "those that became overdue before it, one a second"


def test_of_equal_costs_the_first_to_come_goes_first() -> None:
    line = Line([9.0, 5.0, 3.0, 1.0], [2.0, 1.0, 2.0, 1.0], [100.0] * 4, [math.inf] * 4)
    assert line.served(create_order("shortest"))[0] == [1, 3, 0, 2]


def test_the_rate_of_a_tail_is_estimated() -> None:
    seen = np.random.default_rng(0).exponential(20.0, 1000)
    scratch = np.zeros((2, 1000), dtype=np.int64)
    assert tail_rate(seen, 1000, *scratch) == pytest.approx(1 / 20, rel=0.1)
    assert tail_rate(seen, 3, *scratch) == 0.0
    assert tail_rate(np.ones(1000), 1000, *scratch) == 0.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("shortes", {}, "no order of service 'shortes'; known: boost, fcfs, .*'shortest'"),
        ("fcfs", {"starvation": 3}, "fcfs has no option 'starvation'; it takes: fairness"),
        ("fcfs", {"fairness": -0.1}, "fcfs: fairness must be at least 0 and at most 1, not -0"),
        ("boost", {"fairness": "even"}, "boost: fairness must be a number"),
        ("shortest", {"starvation": 1}, "shortest: starvation must be above 1, not 1"),
        ("shortest", {"starvation": "much"}, "shortest: starvation must be a number"),
        ("boost", {"gamma": 0.0}, "boost: gamma must be above 0, not 0.0"),
        ("boost", {"by": "age"}, "boost: by is 'forecast' or 'prompt', not 'age'"),
    ],
)
def test_what_cannot_be_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_order(name, **options)
