"""Slowed engines: processes that are stopped most of the time, and go on afterwards."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.harm import StepLog, slow_steps

HEADER = "end,requests,new_tokens,context_tokens,seconds,asked_seconds,cpu\n"
STEPS = f"""
import sys, time
with open(sys.argv[1], "a", buffering=1) as log:
    log.write({HEADER!r})
    print("ready", flush=True)
    while True:
        time.sleep(0.002)
        log.write("1,1,1,1,0.002,0.002,0\\n")
"""


@pytest.fixture
def stepping(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-c", STEPS, str(tmp_path / "steps.csv")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def state(process: "subprocess.Popen[bytes]") -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("logs", [True, False])
def test_a_slowed_engine_steps_and_goes_on_afterwards(
    stepping: "subprocess.Popen[bytes]", tmp_path: Path, logs: bool
) -> None:
    log = StepLog(tmp_path / "steps.csv")
    slow_steps(stepping.pid, log if logs else None, 0.5, threading.Event())
    assert state(stepping) != "T"
    log.read()
    assert log.asked > 0


def test_an_engine_that_is_to_be_slow_no_longer_goes_on_at_once(
    stepping: "subprocess.Popen[bytes]",
) -> None:
    ended = threading.Event()
    slowing = threading.Thread(target=slow_steps, args=(stepping.pid, None, 600.0, ended))
    slowing.start()
    ended.set()
    slowing.join(60)
    assert not slowing.is_alive()
    assert state(stepping) != "T"


def test_an_engine_that_dies_meanwhile_is_slow_no_longer(
    stepping: "subprocess.Popen[bytes]",
) -> None:
    stepping.kill()
    stepping.wait()
    slow_steps(stepping.pid, None, 600.0, threading.Event())


def test_steps_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(HEADER + "1,1,1,1,9,9,0\n")
    log = StepLog(path)
    with path.open("a") as file:
        file.write("2,1,1,1,0.4,0.2,0\n3,1,1,1,0.6")
        file.flush()
        assert log.read() == pytest.approx(0.2)
        file.write(",0.3,0\n" + HEADER)  # of the next engine in its place
        file.flush()
        assert log.read() == pytest.approx(0.3)
        assert log.read() == 0
    assert (log.taken, log.asked) == pytest.approx((1.0, 0.5))
