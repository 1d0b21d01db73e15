"""The barrier of emulated ranks: as long as the longest, for those who step, whoever dies."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rescheduler.emulation.step_barrier import StepBarrier

PATIENCE = 30.0


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result(timeout=60) for one in [pool.submit(call) for call in calls]]


Rounds = list[tuple[float, float]]


def stepped(rank: StepBarrier, steps: Sequence[float]) -> Rounds:
    """Take the steps one after the other; return when their rounds began and ended."""
    found = []
    for number, seconds in enumerate(steps):
        found.append(rank.step(seconds, goes_on=number > 0))
        time.sleep(max(0.0, found[-1][1] - time.perf_counter()))
    rank.leave()
    return found


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.floats(1e-4, 4e-3), max_size=12), min_size=2, max_size=4))
def test_steps_of_a_round_end_together_and_no_two_rounds_overlap(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[float]]
) -> None:
    file = tmp_path_factory.mktemp("barrier") / "shared"
    ranks = [StepBarrier(file, rank, PATIENCE) for rank in range(len(steps))]
    found = at_once(
        *(partial(stepped, rank, given) for rank, given in zip(ranks, steps, strict=True))
    )
    for rank in ranks:
        rank.close()
    for own, given_seconds in zip(found, steps, strict=True):
        assert len(own) == len(given_seconds)
        for (start, due), seconds in zip(own, given_seconds, strict=True):
            assert due - start >= seconds - 1e-9
    rounds = sorted({one for own in found for one in own})
    for (_, due), (start, _) in pairwise(rounds):
        assert start >= due - 1e-9


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[[int, float], StepBarrier]]:
    """Makes a rank of a group, with its patience."""
    with ExitStack() as stack:

        def made(number: int, patience: float) -> StepBarrier:
            barrier = StepBarrier(tmp_path / "shared", number, patience)
            stack.callback(barrier.close)
            return barrier

        yield made


def test_a_rank_that_is_killed_holds_the_others_up_once(
    rank: Callable[[int, float], StepBarrier],
) -> None:
    first, second = rank(0, 0.2), rank(1, 0.2)
    second.step(1e-3, goes_on=False)  # and never again
    began = time.perf_counter()
    stepped(first, [1e-3] * 20)
    assert time.perf_counter() - began >= 0.2 - 1e-3, "it did not wait for the other"
    began = time.perf_counter()
    start, due = first.step(1e-3, goes_on=False)
    assert start >= began - 1e-3
    assert due - start == pytest.approx(1e-3)
    again, ends = second.step(2e-3, goes_on=False)  # it was only slow
    assert again >= due - 1e-9
    assert ends - again == pytest.approx(2e-3), "what cannot be caught up with is not asked for"


def test_what_killed_engines_left_behind_is_forgotten(
    rank: Callable[[int, float], StepBarrier],
) -> None:
    rank(1, PATIENCE).step(3_000.0, goes_on=False)  # until an hour from now
    start, due = rank(0, PATIENCE).step(1e-3, goes_on=False)
    assert due - start == pytest.approx(1e-3)
    assert due - time.perf_counter() < 1.0


def test_a_file_of_another_layout_is_replaced(
    tmp_path: Path, rank: Callable[[int, float], StepBarrier]
) -> None:
    (tmp_path / "shared").write_bytes(b"x" * 100)
    start, due = rank(0, PATIENCE).step(1e-3, goes_on=False)
    assert due - start == pytest.approx(1e-3)


def test_a_link_is_not_followed(tmp_path: Path, rank: Callable[[int, float], StepBarrier]) -> None:
    (tmp_path / "else").write_bytes(b"kept")
    (tmp_path / "shared").symlink_to(tmp_path / "else")
    with pytest.raises(OSError, match="symbolic"):
        rank(0, PATIENCE)
    assert (tmp_path / "else").read_bytes() == b"kept"
