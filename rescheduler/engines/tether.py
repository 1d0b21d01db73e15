"""Run a command that ends with the process that holds this one's standard input.

Whatever ends that process, SIGKILL included, closes the pipe. The command and all that it has
started in its process group, which this process must lead, are killed then; a group that is
stopped by SIGSTOP is not, until it goes on.
"""

import os
import resource
import signal
import subprocess
import sys
import threading

__all__ = ["main"]

_FOR_THE_COMMAND = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
"""Signals to the group that this process outlives, since the command may do so."""


def main(command: list[str]) -> int:
    """Run the command; return its exit status, or end by the signal that ended it."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    for number in _FOR_THE_COMMAND:  # not before: one that comes earlier ends both
        signal.signal(number, lambda *_: None)
    threading.Thread(target=_end_with_input, daemon=True).start()
    status = process.wait()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command's core is the one to keep
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    return status


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
