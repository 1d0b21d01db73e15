"""Run a server that ends with this process, and drains before it does.

    python -m rescheduler.engines.tether [--tied] [--drain JSON] COMMAND ...

``--tied``: it ends with the process that holds this one's standard input. Whatever ends that
process, SIGKILL included, closes the pipe. The command and all that it has started in its process
group, which this process must lead, are killed then; a group that is stopped by SIGSTOP is not,
until it goes on.

``--drain``: at the first SIGTERM to this process alone, the proxies hear that the server is being
stopped, and it gets its own SIGTERM once nothing runs there, or at the second one. A SIGTERM to the
whole group stops it at once.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

from rescheduler.engines.launch_upgrade import Drain, wait_until_idle

_FOR_THE_COMMAND = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals to the group that this process outlives, since the command may do so."""
_TELL_SECONDS = 30.0


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status, or end by the signal that ended it."""
    parser = argparse.ArgumentParser(prog="tether")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--drain", type=lambda text: Drain(**json.loads(text)))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    server = _Server(options.drain)
    signal.signal(signal.SIGTERM, server.asked_to_end)  # the command does not inherit it
    for number in _FOR_THE_COMMAND:
        signal.signal(number, lambda *_: None)
    status = server.run(options.command, options.tied)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command's core is the one to keep
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    return status


class _Server:
    def __init__(self, drain: Drain | None) -> None:
        self._drain = drain
        self._asked, self._hurry = threading.Event(), threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def asked_to_end(self, number: int, frame: FrameType | None) -> None:
        """Begin to drain, or end the server; without a drain the group's signal has done so."""
        del number, frame
        if self._asked.is_set():
            self._hurry.set()
        self._asked.set()

    def run(self, command: list[str], tied: bool) -> int:
        """Run the command to its end."""
        if self._drain is not None:
            Path(self._drain.file).unlink(missing_ok=True)  # of one that was killed
        self._process = subprocess.Popen(  # with the sockets that this one was handed for it
            command, stdin=subprocess.DEVNULL, close_fds=False
        )
        if self._drain is None and self._asked.is_set():  # by a signal that came too soon for it
            self._process.terminate()
        if tied:
            threading.Thread(target=_end_with_input, daemon=True).start()
        if self._drain is not None:
            threading.Thread(target=self._end, args=(self._drain,), daemon=True).start()
        status = self._process.wait()
        if self._drain is not None:
            Path(self._drain.file).unlink(missing_ok=True)
            if self._asked.is_set():
                _tell(self._drain, "--undo")  # it stays drained there for as long as it is away
        return status

    def _end(self, drain: Drain) -> None:
        """Once asked to, drain the server, then end it."""
        self._asked.wait()
        with suppress(OSError):  # a full disk must not keep it from ending
            Path(drain.file).touch()
        _tell(drain)
        left = wait_until_idle(drain, self._hurry)
        if left is None or left.requests:
            what = "an unknown number of" if left is None else left.requests
            why = "in a hurry" if self._hurry.is_set() else f"after {drain.seconds:g} s"
            print(f"headway: stopped {why}, with {what} requests", file=sys.stderr, flush=True)
        assert self._process is not None
        self._process.terminate()


def _tell(drain: Drain, *option: str) -> None:
    """Run the command that drains an engine without a control socket at its proxy."""
    if drain.tell:
        with suppress(OSError):
            said = subprocess.Popen([*drain.tell, *option], stdin=subprocess.DEVNULL)
            with suppress(subprocess.TimeoutExpired):
                said.wait(_TELL_SECONDS if option else 0.0)


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
