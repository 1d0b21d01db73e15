"""A server in a process group of its own, with its log."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from rescheduler.commands.event_loop import ending_signals_held, variables_for
from rescheduler.engines.engine_command import EngineCommand, LaunchError
from rescheduler.engines.launch_upgrade import Drain, Load, load_of
from rescheduler.transfer.control_messages import DRAINING_FILE

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
    starts ends with it.

    Args:
        name: of the server.
        command: that starts it.
        url: of its HTTP server.
        log: that what it prints is added to.
        tethered: it ends with this process, however this one ends.
        drain: what SIGTERM to its leader alone does first; None: nothing.
        sockets: that it inherits, by what they are for.
        ready_line: begins the line that it prints once it serves, where another process may answer
            ``/health`` at the same address.
        interpreter: whose environment's programs it finds first.

    Attributes:
        is_gone: none of its processes runs.
    """

    def __init__(
        self,
        name: str,
        command: EngineCommand,
        url: str,
        log: Path,
        tethered: bool = False,
        drain: Drain | None = None,
        sockets: Mapping[str, Sequence[socket.socket]] | None = None,
        ready_line: str | None = None,
        interpreter: str = sys.executable,
    ) -> None:
        self.name = name
        self.url = url
        self.log = log
        self.drain = drain
        self._command, self._tethered = command, tethered
        self._ready_line, self._interpreter = ready_line, interpreter
        self.sockets = sockets or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start, self._started = 0, 0.0
        self.is_gone = True  # the system may give a group's number to another one then

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
        if self._serves():
            return True
        if time.monotonic() - self._started > START_SECONDS:
            raise LaunchError(f"not ready after {START_SECONDS:.0f} s: {self.why_it_ended()}")
        return False

    def start(self) -> None:
        """Start it; it is not ready yet."""
        # Programs of this interpreter's environment are found also where it is not activated.
        programs = Path(self._interpreter).parent
        path = f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        environment = {**os.environ, "PATH": path, **self._command.environment}
        environment |= variables_for(self.sockets) if self.sockets else {}
        tether = []
        if self._tethered or self.drain is not None:
            tether = [self._interpreter, "-m", "rescheduler.engines.tether"]
            tether += ["--tied"] if self._tethered else []
        if self.drain is not None:
            tether += ["--drain", json.dumps(self.drain._asdict())]
            environment[DRAINING_FILE] = self.drain.file
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                [*tether, *self._command.arguments],
                env=environment,
                stdin=subprocess.PIPE if self._tethered else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[one.fileno() for some in self.sockets.values() for one in some],
            )
        self.is_gone, self._started = False, time.monotonic()

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

    def begin_to_end(self) -> None:
        """Ask its leader to end, which drains it first where it has been told how."""
        if self.is_running and self.pid is not None:
            os.kill(self.pid, signal.SIGTERM)  # its number is its own until it has been waited for

    def load(self) -> Load | None:
        """Return what it has left to do; None if it does not say."""
        try:
            return load_of(self.url)
        except ConnectionRefusedError:
            return Load(0, False)

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes, including those that outlived their leader."""
        if self._process is not None and not self.is_gone:
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

    def _serves(self) -> bool:
        if self._ready_line is None:
            return self.is_healthy()
        return any(line.startswith(self._ready_line) for line in self._printed().splitlines())

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
        if self._process is None or self.is_gone:
            return False
        self._process.poll()  # else its leader stays as a zombie
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            self.is_gone = True
            if self._process.stdin is not None:
                self._process.stdin.close()
        return not self.is_gone


def end_of_log(log: Path, most: int, start: int = 0) -> str:
    """Return the last bytes of a log, of those from ``start`` on; nothing if it is gone."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - most))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


Stage = Literal["starting", "ready", "draining", "stopping", "stopped"]

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

    def drain(self, names: Sequence[str]) -> Iterator[dict[str, Load | None]]:
        """Have servers end once nothing runs there; yield what each has left until all are gone.

        One that does not end in time is killed. Whoever takes no more leaves them draining.
        """
        waiting = {name: self.servers[name] for name in names if self.servers[name].is_running}
        seconds = 0.0
        for name, server in waiting.items():
            self._wanted.discard(name)
            self._report(name, "draining" if server.drain is not None else "stopping")
            server.begin_to_end()
            seconds = max(seconds, server.drain.seconds if server.drain is not None else 0.0)
        deadline = time.monotonic() + seconds + GRACE_SECONDS
        while waiting:
            for name, server in list(waiting.items()):
                if not server.is_running or time.monotonic() > deadline:
                    server.kill()  # also what outlived its leader
                    self._report(name, "stopped")
                    del waiting[name]
            if waiting:
                yield {name: server.load() for name, server in waiting.items()}
                time.sleep(_WATCH_SECONDS)

    def stop(self, names: Sequence[str]) -> None:
        """Ask all of these to end at once, then wait for them."""
        started = [self.servers[name] for name in names if not self.servers[name].is_gone]
        for server in started:
            self._report(server.name, "stopping")
            server.signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for server in started:
            server.end_by(deadline)
            self._report(server.name, "stopped")

    def close(self) -> None:
        """Stop all servers, and wait until they are gone."""
        self._wanted.clear()
        with ending_signals_held():  # an impatient Ctrl-C would leave some behind
            self.stop(list(self.servers))
