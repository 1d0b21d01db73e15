"""The clock of emulated steps: as long as asked for, never shorter, and counted."""

import logging
from pathlib import Path

import numpy as np
import pytest

from data_collection.vllm_adapter.emulated_runner import StepSize
from rescheduler.emulation.emulate_options import StepSeconds
from rescheduler.emulation.step_clock import StepClock
from rescheduler.step_time.step_log import read_steps

TIMES = StepSeconds(constant=1e-3, per_new=1e-5, per_context=1e-7)
STEP = StepSize(requests=4, new_tokens=100, context_tokens=5_000, goes_on=True)


def steps(clock: StepClock, count: int) -> None:
    for i in range(count):
        clock.begin(goes_on=i > 0)
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


def test_a_machine_that_is_too_slow_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    clock = StepClock(StepSeconds(constant=1e-7, per_new=0, per_context=0), 1.0, None)
    steps(clock, 50)
    with caplog.at_level(logging.INFO, logger="headway.emulation"):
        clock.close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "raise engine.emulate.dilation" in record.getMessage()


def test_a_clock_that_never_ran_reports_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="headway.emulation"):
        StepClock(TIMES, 1.0, None).close()
    assert not caplog.records
