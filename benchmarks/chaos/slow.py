"""Engines whose steps take ten times as long, without a change of the engines."""

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rescheduler.engines.launch_process import ServerProcess

TIMES = 10
_RUN_SECONDS = 0.01
_CORE = b"VLLM::EngineCore"
_COLUMNS = 7


def engine_core(server: ServerProcess) -> int | None:
    """Return the process id of an engine's core, which takes its steps; None: there is none."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                pid = int(folder.name)
                if os.getpgid(pid) == server.pid and _CORE in (folder / "cmdline").read_bytes():
                    return pid
    return None


@dataclass
class StepLog:
    """The steps that an emulated engine logs, from now on.

    Attributes:
        asked: seconds that the steps read so far should have taken.
        taken: seconds that they took.
    """

    path: Path
    asked: float = 0.0
    taken: float = 0.0

    def __post_init__(self) -> None:
        self._offset, self._part = self.path.stat().st_size, b""

    def read(self) -> float:
        """Return the seconds that the steps should have taken which ended since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._part = (self._part + data).split(b"\n")
        before = self.asked
        for line in lines:
            values = line.split(b",")
            if len(values) == _COLUMNS and not line.startswith(b"end"):
                self.taken += float(values[4])
                self.asked += float(values[5])
        return self.asked - before


def slow_steps(core: int, log: StepLog | None, seconds: float, ended: threading.Event) -> None:
    """Have an engine's steps take ten times as long for a while, or until an event is set.

    Its core runs for a hundredth of a second at a time. Then it is stopped until the steps that it
    took meanwhile have had ten times their time: an emulated engine catches up with steps that are
    late, and takes several at once. One that logs no steps computes all the time, and is stopped
    for nine hundredths.
    """
    end = due = time.monotonic() + seconds
    due -= seconds
    try:
        while (began := time.monotonic()) < end and not ended.is_set():
            os.kill(core, signal.SIGCONT)
            ended.wait(_RUN_SECONDS)
            os.kill(core, signal.SIGSTOP)
            asked = _RUN_SECONDS if log is None else log.read()
            due = max(due, began) + TIMES * asked
            ended.wait(max(0.0, min(due, end) - time.monotonic()))
    except ProcessLookupError:
        pass  # it has ended, which others notice
    finally:
        with suppress(ProcessLookupError):
            os.kill(core, signal.SIGCONT)
