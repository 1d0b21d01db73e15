"""Lets a step last as long as it would on the engine that is emulated."""

import time
from io import FileIO
from pathlib import Path

from data_collection.vllm_adapter.emulated_runner import StepSize, engine_logger
from rescheduler.emulation.emulate_options import MOST_EXCESS, StepSeconds
from rescheduler.emulation.step_barrier import StepBarrier

logger = engine_logger("headway.emulation")

_REPORTED_SECONDS = 60.0
_CAUGHT_UP = 20
"""Steps. With two, bursts of work beyond them made all steps of a busy machine 0.5% too long."""
_COLUMNS = ("end", "requests", "new_tokens", "context_tokens", "seconds", "asked_seconds", "cpu")


class StepClock:
    """Ends every step when it is due.

    Steps that follow each other are timed from the end that the last one was due at, so that what
    the scheduler and the server do in between is hidden in the step, as asynchronous scheduling
    hides it on a GPU. A step that is late is caught up with by those that follow, up to 20 steps'
    time; what the machine cannot catch up with is the excess.

    The dilation makes all steps so many times as long. With a barrier they begin and end with those
    of other engines, and the longest is what is asked for. The log is a CSV file of the steps.

    Raises:
        OSError: the log cannot be written.
    """

    def __init__(
        self,
        step_time: StepSeconds,
        dilation: float,
        log: Path | None,
        barrier: StepBarrier | None = None,
    ) -> None:
        self._step_time = step_time
        self._dilation = dilation
        self._barrier = barrier
        self._due = self._end = self._begun = 0.0
        self._goes_on = False
        self.steps = 0
        self.asked = 0.0
        self.excess = 0.0
        self._reported, self._before = time.perf_counter(), (0, 0.0, 0.0)
        self._log: FileIO | None = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log = log.open("ab", buffering=0)
            if not self._log.tell():
                self._write(",".join(_COLUMNS))

    def idle(self) -> None:
        """Note that nothing is computed: the next step does not follow the last one."""
        self._due = 0.0
        if self._barrier is not None:
            self._barrier.idle()

    def begin(self) -> None:
        """Note that a step begins. It follows the last one unless nothing was computed since."""
        self._begun = time.perf_counter()
        self._goes_on = self._due > 0

    def end(self, step: StepSize) -> None:
        """Wait until a step is due."""
        asked = self._dilation * self._step_time.of(step.new_tokens, step.context_tokens)
        begun = self._begun
        if self._barrier is not None:
            begun, self._due = self._barrier.step(asked, self._goes_on)
            asked = self._due - begun
        else:
            start = self._due if self._goes_on else begun
            self._due = max(start, time.perf_counter() - _CAUGHT_UP * asked) + asked
        left = self._due - time.perf_counter()
        if left > 0:
            time.sleep(left)
        end = time.perf_counter()
        real = end - (self._end if self._goes_on else begun)
        self._end = end
        self.steps += 1
        self.asked += asked
        self.excess += real - asked
        if self._log is not None:
            cpu = time.thread_time()
            size = f"{step.requests},{step.new_tokens},{step.context_tokens}"
            self._write(f"{end:.6f},{size},{real:.6f},{asked:.6f},{cpu:.6f}")
        if end - self._reported > _REPORTED_SECONDS:
            steps, asked, excess = self._before
            self._report(self.steps - steps, self.asked - asked, self.excess - excess)
            self._before, self._reported = (self.steps, self.asked, self.excess), end

    def _report(self, steps: int, asked: float, excess: float) -> None:
        """Log how far real steps are from those asked for."""
        if not asked:
            return
        share = excess / asked
        log = logger.warning if share > MOST_EXCESS else logger.info
        log(
            "%d emulated steps of %.1f s took %+.1f%%%s",
            steps,
            asked,
            100 * share,
            "; this machine is too slow for them: raise engine.emulate.dilation"
            if share > MOST_EXCESS
            else "",
        )

    def close(self) -> None:
        """Report on all steps, and close the log and the barrier."""
        self._report(self.steps, self.asked, self.excess)
        if self._barrier is not None:
            self._barrier.close()
            self._barrier = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _write(self, line: str) -> None:
        assert self._log is not None
        try:
            self._log.write(f"{line}\n".encode())
        except OSError as error:  # a full disk must not end the engine
            logger.warning("steps are not logged from here on: %s", error)
            self._log.close()
            self._log = None
