"""A server that is started again whenever it ends."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Literal

from rescheduler.engines.engine_command import LaunchError
from rescheduler.engines.launch_process import ServerProcess

__all__ = ["KeptServer", "KeptStage"]

KeptStage = Literal["starting", "ready", "stopping", "stopped"]

_POLL_SECONDS = 0.1
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
_START_SECONDS = 1800.0  # large models take that long to load


class KeptServer:
    """Keeps a server running, in a thread of its own, until it is stopped.

    A server that ends is started again at once; one that ends before it was ready, after a wait
    that doubles each time, up to a minute.

    Args:
        server: not running.
        prepare: called before each start; raises `LaunchError` or `OSError` when it cannot be
            started now.
        grace_seconds: that it has to end when asked to.
        starts: file that counts the starts, also those by earlier processes.

    Attributes:
        stage: of the server.
        failures: starts in a row after which it was not ready.
        why: how it last ended by itself, or could not be started; empty: it never did.
    """

    def __init__(
        self,
        server: ServerProcess,
        prepare: Callable[[], None],
        grace_seconds: float,
        starts: Path,
    ) -> None:
        self.stage: KeptStage = "starting"
        self.failures = 0
        self.why = ""
        self._server, self._prepare, self._grace = server, prepare, grace_seconds
        self._starts_file = starts
        self._ending, self._asked = Event(), Event()
        self._thread = Thread(target=self._keep, daemon=True)

    @property
    def starts(self) -> int:
        """How often it was started."""
        return self._starts_file.stat().st_size if self._starts_file.exists() else 0

    def begin(self) -> None:
        """Start it, and keep it running."""
        self._thread.start()

    def restart(self) -> int:
        """Have it stopped and started again; return how often it was started before.

        Earlier failures no longer count: whoever asks wants to know how the next start goes.
        """
        before = self.starts
        self.failures = 0
        self._asked.set()
        return before

    def stop(self) -> None:
        """Stop it for good; its processes are gone afterwards."""
        self._ending.set()
        self._asked.set()
        self._thread.join()

    def _keep(self) -> None:
        wait = _FIRST_WAIT
        while not self._ending.is_set():
            self._asked.clear()
            if self._ending.is_set():  # it was set between the two lines above
                break
            self.stage = "starting"
            try:
                self._start()
                self._until_ready()
                if not self._asked.is_set():
                    self.stage, self.failures, wait = "ready", 0, _FIRST_WAIT
                    self._until_asked()
            except LaunchError as error:
                self.why = str(error)
                was_ready, self.stage = self.stage == "ready", "starting"
                self._server.kill()  # what outlived its leader
                if not was_ready:
                    self.failures += 1
                    self._asked.wait(wait)
                    wait = min(2 * wait, _LONGEST_WAIT)
            else:
                self.stage = "stopping"
                self._server.signal(signal.SIGTERM)
                self._server.end_by(time.monotonic() + self._grace)
        self.stage = "stopped"

    def _start(self) -> None:
        """Start it; it is not ready yet.

        Raises:
            LaunchError: it cannot be started now, as where the disk is full.
        """
        try:
            self._prepare()
            with self._starts_file.open("ab") as counted:
                counted.write(b"*")
            self._server.start()
        except OSError as error:
            raise LaunchError(f"{self._server.name} cannot be started: {error}") from error

    def _until_ready(self) -> None:
        """Wait until it is ready, or is to end.

        Raises:
            LaunchError: it has ended, or takes too long.
        """
        deadline = time.monotonic() + _START_SECONDS
        while not self._asked.is_set() and not self._server.is_healthy():
            if not self._server.is_running:
                raise LaunchError(self._server.why_it_ended())
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"not ready after {_START_SECONDS:.0f} s: {self._server.why_it_ended()}"
                )
            self._asked.wait(_POLL_SECONDS)

    def _until_asked(self) -> None:
        """Wait until it is to end.

        Raises:
            LaunchError: it has ended.
        """
        while not self._asked.wait(_POLL_SECONDS):
            if not self._server.is_running:
                raise LaunchError(self._server.why_it_ended())
