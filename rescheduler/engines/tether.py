"""Run a command that ends with the process that holds this one's standard input.

Whatever ends that process, SIGKILL included, closes the pipe. The command and all that it has
started in its process group, which this process must lead, are killed then.
"""

import os
import signal
import subprocess
import sys
import threading

__all__ = ["main"]


def main(command: list[str]) -> int:
    """Run the command; return its exit status, or end by the signal that ended it."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # meant for the command, which takes its time
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_input, daemon=True).start()
    status = process.wait()
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
