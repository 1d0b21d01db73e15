"""When what waits starts, and how full instances are until then."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.forecasts.forecast import PointForecast
from rescheduler.finish_times.load_ahead import ANYWHERE, STEPS, LoadAhead, Queue, load_ahead


def integers(values: list[int]) -> Any:
    return np.array(values, dtype=np.int64)


def ahead(
    left: list[int],
    context: list[int],
    waiting: list[tuple[int, int]],
    slots: int = 2,
    capacity: int = 10_000,
    instance: list[int] | None = None,
    fixed: list[int] | None = None,
    n_instances: int = 1,
) -> LoadAhead:
    """The load of requests that end after so many tokens for certain."""
    queue = PointForecast.new([float(length) for length, _ in waiting])
    return load_ahead(
        PointForecast.new([float(tokens) for tokens in left]),
        integers(instance or [0] * len(left)),
        integers(context),
        integers([slots] * n_instances),
        integers([capacity] * n_instances),
        Queue(
            queue.at(STEPS) if waiting else np.empty((0, len(STEPS))),
            integers([prompt for _, prompt in waiting]),
            integers(fixed or [ANYWHERE] * len(waiting)),
        ),
    )


def test_a_free_place_is_taken_at_once() -> None:
    found = ahead([50], [10], [(20, 100)])
    assert found.start.tolist() == [0.0]
    assert found.instance.tolist() == [0]


def test_a_place_is_free_when_the_first_request_ends() -> None:
    found = ahead([50, 200], [10, 10], [(20, 100), (20, 100)])
    step = STEPS[np.searchsorted(STEPS, 50)] - STEPS[np.searchsorted(STEPS, 50) - 1]
    first, second = found.start.tolist()
    assert first == pytest.approx(50, abs=step)
    assert second == pytest.approx(first + 20, abs=2 * step), "after the first of those that wait"


def test_memory_is_waited_for_as_places_are() -> None:
    found = ahead([100], [800], [(20, 300)], slots=16, capacity=1_000)
    assert found.start[0] == pytest.approx(100, abs=20)
    alone = ahead([], [], [(20, 5_000)], slots=16, capacity=1_000)
    assert alone.start.tolist() == [0.0], "whether it ever fits, the engine says"


def test_what_waits_on_an_instance_waits_for_that_one() -> None:
    found = ahead([80, 80], [10, 10], [(5, 10), (5, 10)], 2, 10_000, [0, 0], [0, 1], 2)
    assert found.start[1] == 0.0
    assert found.start[0] > 50
    assert found.instance.tolist() == [0, 1]


def test_what_no_instance_has_room_for_never_starts() -> None:
    found = ahead([], [], [(20, 10)], slots=0)
    assert found.start.tolist() == [np.inf]
    assert found.instance.tolist() == [ANYWHERE]
    assert found.next_start(10) == np.inf


def test_one_more_counts_for_the_next() -> None:
    found = ahead([50, 60], [10, 10], [], slots=2)
    curve = PointForecast.new([30.0]).at(STEPS)[0]
    first = found.next_start(10)
    found = found.with_one_more(curve, 10)
    second = found.next_start(10)
    found = found.with_one_more(curve, 10)
    assert first <= second < found.next_start(10)
    assert found.start.tolist() == [first, second]


def test_drained_when_the_last_one_ends() -> None:
    found = ahead([50, 300], [10, 10], [(9_999, 10)])
    assert found.drained[0] == pytest.approx(300, abs=40), "what waits does not count"
    assert ahead([], [], []).drained.tolist() == [0.0]


def test_tokens_grow_until_requests_end() -> None:
    found = ahead([100], [40], [])
    assert float(found.at(0.0)[2, 0]) == 40
    assert float(found.at(7.0)[2, 0]) == 47
    assert float(found.at(5_000.0)[2, 0]) == 0


@given(
    left=st.lists(st.integers(1, 3_000), max_size=6),
    waiting=st.lists(st.tuples(st.integers(1, 3_000), st.integers(1, 500)), max_size=8),
    slots=st.integers(1, 4),
)
def test_no_more_run_than_there_are_slots(
    left: list[int], waiting: list[tuple[int, int]], slots: int
) -> None:
    left = left[:slots]
    found = ahead(left, [10] * len(left), waiting, slots=slots)
    assert (found.load[0] <= slots + 1e-6).all()
    assert (found.load[0] >= -1e-9).all() and (found.load[3] >= -1e-6).all()
    starts = found.start[np.isfinite(found.start)]
    assert (np.diff(starts) >= -1e-6).all(), "alike in memory, they start in their order"
    assert found.next_start(10) >= starts.max(initial=0.0)
