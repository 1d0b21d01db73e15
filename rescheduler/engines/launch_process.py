"""A server in a process group of its own, with its log."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from rescheduler.commands.event_loop import ending_signals_held
from rescheduler.engines.engine_command import EngineCommand, LaunchError

__all__ = ["GRACE_SECONDS", "START_SECONDS", "ServerGroup", "ServerProcess", "Stage", "end_of_log"]


START_SECONDS = 1800.0
"""Time a server has to be ready: large models take that long to load."""
_POLL_SECONDS = 0.1
_HEALTH_SECONDS = 2.0
_KILLED_SECONDS = 10.0
_SHOWN_LINES = 15
_LOG_END = 64 << 10
_RAISED = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception|Interrupt)\b: \S.*")
_ONLY_CONSEQUENCES = ("Engine core initialization failed", "See stack trace", "EngineDeadError")


class ServerProcess:
    """A server that answers ``/health`` once it is ready.

    It leads a session of its own: a Ctrl-C in the terminal does not reach it, and whatever it
    starts ends with it. If ``tethered``, it ends with this process, however this one ends.
    """

    def __init__(
        self, name: str, command: EngineCommand, url: str, log: Path, tethered: bool = False
    ) -> None:
        self.name = name
        self.url = url
        self.log = log
        self._command, self._tethered = command, tethered
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start, self._started = 0, 0.0
        self._is_gone = True  # the system may give a group's number to another one then

    @property
    def pid(self) -> int | None:
        """Process id of its leader, and of its group; None before its first start."""
        return self._process.pid if self._process else None

    @property
    def exit_status(self) -> int | None:
        """How its leader ended, negative by a signal; None while it runs."""
        return self._process.poll() if self._process else None

    @property
    def is_running(self) -> bool:
        """Whether its leader runs."""
        return self._process is not None and self._process.poll() is None

    def is_ready(self) -> bool:
        """Return whether it is healthy; raises `LaunchError` if it has ended, or takes too long."""
        if not self.is_running:
            raise LaunchError(self.why_it_ended())
        if self.is_healthy():
            return True
        if time.monotonic() - self._started > START_SECONDS:
            raise LaunchError(f"not ready after {START_SECONDS:.0f} s: {self.why_it_ended()}")
        return False

    def start(self) -> None:
        """Start it; it is not ready yet."""
        # Programs of this interpreter's environment are found also where it is not activated.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        environment = {**os.environ, "PATH": path, **self._command.environment}
        tether = [sys.executable, "-m", "rescheduler.engines.tether"] if self._tethered else []
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                [*tether, *self._command.arguments],
                env=environment,
                stdin=subprocess.PIPE if tether else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._is_gone, self._started = False, time.monotonic()

    def is_healthy(self) -> bool:
        """Return whether it answers ``/health`` with success now."""
        parts = urlsplit(self.url)
        connection = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=_HEALTH_SECONDS)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes, including those that outlived their leader."""
        if self._process is not None and not self._is_gone:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End all of its processes at once, and wait until they are gone."""
        self.signal(signal.SIGKILL)
        self._wait_until_gone(_KILLED_SECONDS)

    def end_by(self, deadline: float) -> None:
        """Wait until all of its processes are gone; at this monotonic time, kill them."""
        if not self._wait_until_gone(deadline - time.monotonic()):
            self.kill()

    def last_lines(self, lines: int = _SHOWN_LINES) -> list[str]:
        """Return the end of what it printed since it was last started."""
        return self._printed().splitlines()[-lines:]

    def why_it_ended(self) -> str:
        """Return how it ended, with the exception it printed, if any, and its last lines."""
        status = self.exit_status
        if status is None:
            how = "is still running"
        elif status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"exited with status {status}"
        raised = [
            line
            for line in _RAISED.findall(self._printed())
            if not any(words in line for words in _ONLY_CONSEQUENCES)
        ]
        because = f": {raised[-1]}" if raised else ""
        shown = "".join(f"\n  {line}" for line in self.last_lines())
        return f"{self.name} {how}{because}\n{self.log} ends:{shown}"

    def _printed(self) -> str:
        return end_of_log(self.log, _LOG_END, self._log_start)

    def _wait_until_gone(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._group_exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _group_exists(self) -> bool:
        if self._process is None or self._is_gone:
            return False
        self._process.poll()  # else its leader stays as a zombie
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            self._is_gone = True
            if self._process.stdin is not None:
                self._process.stdin.close()
        return not self._is_gone


def end_of_log(log: Path, most: int, start: int = 0) -> str:
    """Return the last bytes of a log, of those from ``start`` on; nothing if it is gone."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - most))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


Stage = Literal["starting", "ready", "stopping", "stopped"]

GRACE_SECONDS = 15.0
"""Time an engine has to exit after SIGTERM."""
_WATCH_SECONDS = 0.25


class ServerGroup:
    """Servers, none of which runs yet, by name; each of their stages is reported."""

    def __init__(
        self, servers: Sequence[ServerProcess], report: Callable[[str, Stage], None]
    ) -> None:
        self.servers = {server.name: server for server in servers}
        self._report = report
        self._wanted: set[str] = set()

    def start(self, names: Sequence[str], at_once: int | None = None) -> None:
        """Start servers, so many at a time, until all are ready; raises as `is_ready` does."""
        waiting, loading = list(names), list[str]()
        while waiting or loading:
            while waiting and len(loading) < (at_once or len(names)):
                name = waiting.pop(0)
                self._report(name, "starting")
                self._wanted.add(name)
                with ending_signals_held():  # what runs is known, so that it can be stopped
                    self.servers[name].start()
                loading.append(name)
            for name in loading[:]:
                try:
                    is_ready = self.servers[name].is_ready()
                except LaunchError:
                    self._wanted.discard(name)
                    raise
                if is_ready:
                    loading.remove(name)
                    self._report(name, "ready")
            if loading:
                time.sleep(_WATCH_SECONDS)

    def kill(self, name: str) -> None:
        """End a server's processes at once, as a crash would."""
        self._wanted.discard(name)
        self.servers[name].kill()

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a server's processes: SIGSTOP suspends it, SIGCONT resumes it."""
        self.servers[name].signal(number)

    def restart(self, name: str) -> None:
        """Stop a server if it runs, start it, and wait until it is ready."""
        self._wanted.discard(name)
        self.stop([name])
        self.start([name])

    def take_ended(self) -> list[ServerProcess]:
        """Return the servers that exited on their own since the last call; kill what they left."""
        ended = [name for name in self._wanted if not self.servers[name].is_running]
        self._wanted.difference_update(ended)
        for name in ended:
            self.servers[name].signal(signal.SIGKILL)
        return [self.servers[name] for name in ended]

    @property
    def is_running(self) -> bool:
        """Whether any server runs."""
        return any(server.is_running for server in self.servers.values())

    def stop(self, names: Sequence[str], grace_seconds: float = GRACE_SECONDS) -> None:
        """Ask all of these to end, then wait for them."""
        started = [self.servers[name] for name in names if self.servers[name].pid is not None]
        for server in started:
            self._report(server.name, "stopping")
            server.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        for server in started:
            server.end_by(deadline)
            self._report(server.name, "stopped")

    def close(self) -> None:
        """Stop all servers, and wait until they are gone."""
        self._wanted.clear()
        with ending_signals_held():  # an impatient Ctrl-C would leave some behind
            self.stop(list(self.servers))
