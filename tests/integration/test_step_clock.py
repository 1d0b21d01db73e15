"""The clock of emulated steps: as long as asked for, never shorter, and counted."""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from data_collection.vllm_adapter.emulated_runner import StepSize
from rescheduler.emulation.emulate_options import StepSeconds
from rescheduler.emulation.step_barrier import StepBarrier
from rescheduler.emulation.step_clock import StepClock
from rescheduler.step_time.profile import read_steps

TIMES = StepSeconds(constant=1e-3, per_new=1e-5, per_context=1e-7)
STEP = StepSize(requests=4, new_tokens=100, context_tokens=5_000)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What a clock logs, which vLLM's logger keeps from pytest's."""
    logger = logging.getLogger("vllm.headway.emulation")
    logger.addHandler(caplog.handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield caplog
    logger.setLevel(level)
    logger.removeHandler(caplog.handler)


def constant(seconds: float) -> StepSeconds:
    return StepSeconds(constant=seconds, per_new=0, per_context=0)


def steps(clock: StepClock, count: int) -> None:
    for _ in range(count):
        clock.begin()
        clock.end(STEP)


def test_steps_take_what_their_size_asks_for(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "steps.csv"
    clock = StepClock(TIMES, 2.0, log)
    steps(clock, 20)
    clock.close()
    assert clock.asked == pytest.approx(20 * 2 * (1e-3 + 1e-3 + 0.5e-3))
    assert clock.excess > -1e-3  # a step that was late is caught up with; none is early
    measured = read_steps(log)
    assert measured.shape == (20, 3)
    assert (measured[:, :2] == [100, 5_000]).all()
    asked = np.genfromtxt(log, delimiter=",", names=True)["asked_seconds"]
    assert asked == pytest.approx(np.full(20, 5e-3))


class SteppedTime:
    """Stands in for `time`: nothing passes but what is slept, and what the machine is busy for."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    thread_time = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> SteppedTime:
    stepped = SteppedTime()
    monkeypatch.setattr("rescheduler.emulation.step_clock.time", stepped)
    return stepped


@pytest.mark.parametrize(("busy", "never_caught_up"), [(7, 0), (19, 0), (30, 10)])
def test_steps_that_were_late_are_caught_up_with(
    passing: SteppedTime, busy: int, never_caught_up: int
) -> None:
    clock = StepClock(constant(0.02), 1.0, None)
    steps(clock, 2)
    passing.now += busy * 0.02
    steps(clock, 40)
    assert clock.excess == pytest.approx(never_caught_up * 0.02)


@pytest.mark.parametrize(
    ("seconds", "level", "words"),
    [
        (1e-7, logging.WARNING, "raise engine.emulate.dilation"),
        (0.03, logging.INFO, "3 emulated steps of 0.1 s took +0.0%"),
    ],
)
def test_how_well_the_machine_keeps_up_is_reported(
    told: pytest.LogCaptureFixture, seconds: float, level: int, words: str
) -> None:
    clock = StepClock(constant(seconds), 1.0, None)
    steps(clock, 3)
    if level == logging.INFO:
        clock.excess = 0.0  # this machine may be busy
    clock.close()
    assert words in told.text
    assert told.records[0].levelno == level


def test_a_warning_is_of_the_last_minute(
    passing: SteppedTime, told: pytest.LogCaptureFixture
) -> None:
    clock = StepClock(constant(0.02), 1.0, None)
    steps(clock, 60_000)
    assert {record.levelno for record in told.records} == {logging.INFO}
    told.clear()
    for _ in range(4_000):
        clock.begin()
        passing.now += 0.024
        clock.end(STEP)
    assert told.records[-1].levelno == logging.WARNING
    assert clock.excess / clock.asked < 0.02
    told.clear()
    clock.close()
    assert "64000 emulated steps" in told.text and told.records[0].levelno == logging.INFO


def test_a_clock_that_never_ran_reports_nothing(told: pytest.LogCaptureFixture) -> None:
    StepClock(TIMES, 1.0, None).close()
    assert not told.text


def test_behind_a_barrier_the_longest_step_is_what_is_asked_for(tmp_path: Path) -> None:
    clocks = []
    for rank, seconds in enumerate((2e-3, 5e-3)):
        barrier = StepBarrier(tmp_path / "shared", rank, 10.0)
        clocks.append(StepClock(constant(seconds), 1.0, tmp_path / f"{rank}.csv", barrier))
    begun, ended = Event(), Event()

    def goes_on_until_the_other_ends() -> None:
        steps(clocks[0], 1)
        begun.set()
        while not ended.is_set():
            steps(clocks[0], 1)

    with ThreadPoolExecutor(1) as pool:
        going_on = pool.submit(goes_on_until_the_other_ends)
        begun.wait()
        steps(clocks[1], 50)
        clocks[1].close()
        ended.set()
        going_on.result(timeout=60)
    clocks[0].close()
    asked = [
        np.genfromtxt(tmp_path / f"{rank}.csv", delimiter=",", names=True)["asked_seconds"]
        for rank in range(2)
    ]
    assert asked[1] == pytest.approx(np.full(50, 5e-3), abs=1e-6)
    together = np.isclose(asked[0], 5e-3, atol=1e-6)
    assert together.sum() == 50
    assert asked[0][~together] == pytest.approx(2e-3, abs=1e-6)


def test_a_step_after_an_idle_time_is_one_of_its_own() -> None:
    clock = StepClock(constant(0.02), 1.0, None)
    steps(clock, 2)
    clock.idle()
    time.sleep(2.0)
    before = time.perf_counter()
    steps(clock, 1)
    assert time.perf_counter() - before >= 0.02, "no step is free because time has passed"
    late = clock.excess
    steps(clock, 1)
    assert late < 2.0, "the idle time is none of a step's"


def test_a_full_disk_ends_the_log_and_no_engine(told: pytest.LogCaptureFixture) -> None:
    clock = StepClock(TIMES, 1.0, Path("/dev/full"))
    steps(clock, 3)
    clock.close()
    assert clock.steps == 3
    assert "not logged" in told.text


def test_a_log_goes_on_where_an_engine_was_restarted(tmp_path: Path) -> None:
    log = tmp_path / "steps.csv"
    for _ in range(2):
        clock = StepClock(TIMES, 1.0, log)
        steps(clock, 4)
        clock.close()
    assert len(read_steps(log)) == 8
