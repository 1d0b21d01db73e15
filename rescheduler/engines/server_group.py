"""Servers on this machine that belong together: start, watch, stop."""

import signal
import time
from collections.abc import Callable, Sequence
from typing import Literal

from rescheduler.commands.interrupts import ending_signals_held
from rescheduler.engines.launch_checks import LaunchError
from rescheduler.engines.launch_process import ServerProcess

__all__ = ["GRACE_SECONDS", "ServerGroup", "Stage"]

Stage = Literal["starting", "ready", "stopping", "stopped"]

GRACE_SECONDS = 15.0
"""Time an engine has to exit after SIGTERM."""
_POLL_SECONDS = 0.25
_START_SECONDS = 1800.0  # large models take that long to load


class ServerGroup:
    """Servers, by name.

    Attributes:
        servers: by name, in the order they were given.

    Args:
        servers: none of which runs yet.
        report: called with a server's name at each of its stages.
    """

    def __init__(
        self, servers: Sequence[ServerProcess], report: Callable[[str, Stage], None]
    ) -> None:
        self.servers = {server.name: server for server in servers}
        self._report = report
        self._wanted: set[str] = set()

    def start(self, names: Sequence[str], at_once: int | None = None) -> None:
        """Start servers and wait until all are ready.

        Args:
            names: of them, in order.
            at_once: how many load at the same time; None: all.

        Raises:
            LaunchError: one ended, or was not ready in time; shows the end of its log.
        """
        waiting, loading = list(names), dict[str, float]()
        while waiting or loading:
            while waiting and len(loading) < (at_once or len(names)):
                name = waiting.pop(0)
                self._report(name, "starting")
                self._wanted.add(name)
                with ending_signals_held():  # what runs is known, so that it can be stopped
                    self.servers[name].start()
                loading[name] = time.monotonic()
            for name, began in list(loading.items()):
                server = self.servers[name]
                if not server.is_running:
                    self._wanted.discard(name)
                    raise LaunchError(server.why_it_ended())
                if server.is_healthy():
                    del loading[name]
                    self._report(name, "ready")
                elif time.monotonic() - began > _START_SECONDS:
                    raise LaunchError(
                        f"not ready after {_START_SECONDS:.0f} s: {server.why_it_ended()}"
                    )
            if loading:
                time.sleep(_POLL_SECONDS)

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
        """Return the servers that exited on their own since the last call."""
        ended = [name for name in self._wanted if not self.servers[name].is_running]
        self._wanted.difference_update(ended)
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
