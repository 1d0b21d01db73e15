"""What runs of a server and everything that it started."""

import os
from collections.abc import Iterable

import psutil


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return those that have not ended."""
    return [one for one in processes if one.is_running() and one.status() != "zombie"]


def processes_in(group: int) -> list[psutil.Process]:
    """Return the processes of a group that have not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found
