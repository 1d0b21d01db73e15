"""Lets a step last as long as it would on the engine that is emulated."""

import csv
import logging
import time
from pathlib import Path

from data_collection.vllm_adapter.emulated_runner import StepSize
from rescheduler.emulation.emulate_options import StepSeconds

__all__ = ["MOST_EXCESS", "StepClock"]

logger = logging.getLogger("headway.emulation")

MOST_EXCESS = 0.02
"""Time beyond that of the emulated engine, as a share of it, up to which a run is valid."""

_REPORTED_SECONDS = 60.0
_COLUMNS = ("end", "requests", "new_tokens", "context_tokens", "seconds", "asked_seconds", "cpu")


class StepClock:
    """Ends every step when it is due.

    Steps that follow each other are timed from the end that the last one was due at, so that what
    the scheduler and the server do in between is hidden in the step, as asynchronous scheduling
    hides it on a GPU. A step that is late is caught up with by the next one, and no further.

    Args:
        step_time: seconds of a step.
        dilation: all steps take so many times as long.
        log: CSV file of the steps; None: they are not logged.

    Raises:
        OSError: the log cannot be written.
    """

    def __init__(self, step_time: StepSeconds, dilation: float, log: Path | None) -> None:
        self._step_time, self._dilation = step_time, dilation
        self._due = self._end = self._begun = 0.0
        self._goes_on = False
        self.steps, self.asked, self.excess = 0, 0.0, 0.0
        self._reported = time.perf_counter()
        self._log = self._file = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._file = log.open("w", encoding="utf-8", newline="", buffering=1)
            self._log = csv.writer(self._file)
            self._log.writerow(_COLUMNS)

    def begin(self, goes_on: bool) -> None:
        """Note that a step begins, which goes on with requests of the last one or is a new one."""
        self._begun = time.perf_counter()
        self._goes_on = goes_on and self.steps > 0

    def end(self, step: StepSize) -> None:
        """Wait until a step is due."""
        asked = self._dilation * self._step_time.of(step.new_tokens, step.context_tokens)
        now = time.perf_counter()
        start = self._due if self._goes_on else self._begun
        self._due = max(start, now - 2 * asked) + asked
        if self._due > now:
            time.sleep(self._due - now)
        end = time.perf_counter()
        real = end - (self._end if self._goes_on else self._begun)
        self._end = end
        self.steps += 1
        self.asked += asked
        self.excess += real - asked
        if self._log is not None:
            cpu = time.thread_time()
            row = (f"{end:.6f}", *step[:3], f"{real:.6f}", f"{asked:.6f}", f"{cpu:.6f}")
            self._log.writerow(row)
        if end - self._reported > _REPORTED_SECONDS:
            self.report()
            self._reported = end

    def report(self) -> None:
        """Log how far real steps are from those asked for."""
        if not self.asked:
            return
        share = self.excess / self.asked
        level = logging.WARNING if share > MOST_EXCESS else logging.INFO
        logger.log(
            level,
            "%d emulated steps of %.1f s took %+.1f%%%s",
            self.steps,
            self.asked,
            100 * share,
            "; this machine is too slow for them: raise engine.emulate.dilation"
            if share > MOST_EXCESS
            else "",
        )

    def close(self) -> None:
        """Report, and close the log."""
        self.report()
        if self._file is not None:
            self._file.close()
            self._file = self._log = None
